/* The calls of PyTorch's pluggable allocator, in its order, on a simulated device. */
#include "check.h"
#include <pthread.h>

/* A block of another thread's stream, which this thread uses on its default stream. */
typedef struct lent {
    aq_runtime runtime;
    void *stream, *memory;
    uint64_t bytes;
} lent;

static void *use_on_own_default_stream(void *argument) {
    lent *l = argument;
    void *own = (void *)(uintptr_t)2;
    OK(aq_sim_stream_wait(l->runtime, 0, own, l->stream));
    aq_torch_record_stream(l->memory, own);
    OK(aq_sim_touch(l->runtime, 0, own, (uint64_t)(uintptr_t)l->memory, l->bytes, AQ_READ));
    return NULL;
}

int main(void) {
    aq_runtime_options options = simulated(2);
    options.streams = AQ_STREAMS_RETIRED;
    options.sim_seed = 5;
    OK(aq_torch_setup(&options));
    ANSWERS(AQ_ERROR_BUSY, aq_torch_setup(&options));
    aq_torch_init(2);
    aq_runtime runtime = 0, again = 0;
    ANSWERS(AQ_ERROR_NULL, aq_torch_runtime(NULL));
    OK(aq_torch_runtime(&runtime));
    OK(aq_torch_runtime(&again));
    CHECK(runtime == again);

    void *stream = stream_of(runtime, 0), *other = stream_of(runtime, 0), *stream_on_1 = stream_of(runtime, 1);
    CHECK(aq_torch_alloc(0, 0, stream) == NULL);
    CHECK(aq_torch_alloc(-1, 0, stream) == NULL);
    CHECK(aq_torch_alloc(512, -1, stream) == NULL && strstr(aq_last_error(), "-1") != NULL);
    CHECK(aq_torch_alloc(512, 2, stream) == NULL);
    CHECK(aq_torch_alloc((ptrdiff_t)1 << 40, 0, stream) == NULL && strstr(aq_last_error(), "out of memory") != NULL);

    void *memory = stream;
    ANSWERS(AQ_ERROR_NULL, aq_torch_malloc(512, 0, stream, NULL));
    ANSWERS(AQ_ERROR_TOO_LARGE, aq_torch_malloc(-1, 0, stream, &memory));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc((ptrdiff_t)1 << 40, 0, stream, &memory));
    CHECK(memory == stream);
    OK(aq_torch_malloc(0, 0, stream, &memory));
    CHECK(memory == NULL);
    OK(aq_torch_record_stream(memory, other));
    OK(aq_torch_free(memory, 0, 0, stream));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc((ptrdiff_t)1 << 50, 0, stream, &memory));

    /* A caller with only the address frees by it, on any device. */
    for (int n = 0; n < 64; n++) {
        void *here = NULL, *there = NULL;
        OK(aq_torch_malloc(4096, 0, stream, &here));
        OK(aq_torch_malloc(4096, 1, NULL, &there));
        CHECK(stats_of(runtime, 0).blocks == 1 && stats_of(runtime, 1).blocks == 1);
        aq_torch_record_stream(there, stream_on_1);
        OK(aq_torch_free(there, 0, -1, NULL));
        OK(aq_torch_free(here, 0, -1, NULL));
        CHECK(stats_of(runtime, 0).blocks == 0 && stats_of(runtime, 1).blocks == 0);
        ANSWERS(AQ_ERROR_DOUBLE_FREE, aq_torch_free(here, 0, -1, NULL));
    }
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_torch_free(&memory, 0, -1, NULL));

    size_t size = 0;
    void *tensor = aq_torch_alloc(1000, 0, stream);
    CHECK(aq_torch_base_alloc(tensor, &size) == tensor && size == 1024);
    CHECK(aq_torch_base_alloc((char *)tensor + 8, &size) == NULL);
    aq_torch_free(tensor, 1000, 0, stream);
    aq_torch_free(tensor, 1000, 0, stream);
    CHECK(strstr(aq_last_error(), "freed already") != NULL);
    aq_torch_free(NULL, 0, 0, stream);
    CHECK(stats_of(runtime, 0).blocks == 0);
    aq_torch_record_stream(tensor, other);
    CHECK(strstr(aq_last_error(), "does not belong to this pool") != NULL);

    /* Recorded first, used afterwards: the use counts all the same, since the block is freed after it. */
    for (int n = 0; n < 200; n++) {
        uint64_t bytes = 1u << 20;
        void *x = aq_torch_alloc((ptrdiff_t)bytes, 0, stream);
        uint64_t address = (uint64_t)(uintptr_t)x;
        OK(aq_sim_touch(runtime, 0, stream, address, bytes, AQ_WRITE));
        OK(aq_sim_stream_wait(runtime, 0, other, stream));
        aq_torch_record_stream(x, other);
        aq_torch_record_stream(x, other);
        OK(aq_sim_touch(runtime, 0, other, address, bytes, AQ_READ));
        aq_torch_free(x, (ptrdiff_t)bytes, 0, stream);
        x = aq_torch_alloc((ptrdiff_t)bytes, 0, stream);
        OK(aq_sim_touch(runtime, 0, stream, (uint64_t)(uintptr_t)x, bytes, AQ_WRITE));
        aq_torch_free(x, (ptrdiff_t)bytes, 0, stream);
    }
    /* Handle 2 is the default stream of the thread that recorded it, not of the one that frees. */
    for (int n = 0; n < 20; n++) {
        lent l = {runtime, stream, NULL, 1u << 20};
        l.memory = aq_torch_alloc((ptrdiff_t)l.bytes, 0, stream);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, use_on_own_default_stream, &l) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        OK(aq_torch_free(l.memory, (ptrdiff_t)l.bytes, 0, stream));
        void *next = aq_torch_alloc((ptrdiff_t)l.bytes, 0, stream);
        OK(aq_sim_touch(runtime, 0, stream, (uint64_t)(uintptr_t)next, l.bytes, AQ_WRITE));
        OK(aq_torch_free(next, (ptrdiff_t)l.bytes, 0, stream));
    }
    OK(aq_sim_stream_synchronize(runtime, 0, other));
    aq_torch_reset();
    CHECK(stats_of(runtime, 0).physical == 0);

    uint64_t limit = 0;
    aq_device_facts facts;
    memset(&facts, 0, sizeof facts);
    facts.size = sizeof facts;
    OK(aq_device(runtime, 1, &facts));
    aq_torch_memory_fraction(0.5, 1);
    OK(aq_limit(runtime, 1, &limit, NULL));
    CHECK(limit == facts.memory / 2);
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_memory_fraction(1.5, 1));
    CHECK(strstr(aq_last_error(), "1.5") != NULL);
    OK(aq_limit(runtime, 1, &limit, NULL));
    CHECK(limit == facts.memory / 2);

    in_order(runtime, 2);
    OK(aq_stream_retire(runtime, 0, stream));
    OK(aq_stream_retire(runtime, 0, other));
    OK(aq_runtime_destroy(runtime));
    CHECK(aq_torch_alloc(512, 0, NULL) == NULL && strstr(aq_last_error(), "has been destroyed") != NULL);
    OK(aq_torch_setup(&options));
    OK(aq_torch_runtime(&again));
    CHECK(again != runtime && aq_torch_alloc(512, 0, NULL) != NULL);
    OK(aq_runtime_destroy(again));
    puts("torch: what it calls does what it says");
    return 0;
}
