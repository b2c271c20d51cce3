/* Captures by PyTorch's names of pools, and launches of what was captured against other traffic, on a simulated device. */
#include "check.h"

#define MIB (1u << 20)

static int drops = 0, asked = 0;

/* Of the streams at `data`, which end with null. */
static int belongs(void *data, void *stream) {
    asked++;
    for (void **one = data; *one != NULL; one++) {
        if (*one == stream) {
            return 1;
        }
    }
    return 0;
}

static void drop(void *data) {
    (void)data;
    drops++;
}

static void *take(uint64_t bytes, void *stream) {
    void *memory = NULL;
    OK(aq_torch_malloc((ptrdiff_t)bytes, 0, stream, &memory));
    return memory;
}

static void touch(aq_runtime runtime, void *stream, void *memory, uint64_t bytes, uint32_t access) {
    OK(aq_sim_touch(runtime, 0, stream, (uint64_t)(uintptr_t)memory, bytes, access));
}

/* Captures, into a pool, a block that is written and freed. The graph. */
static uint64_t temporary(aq_runtime runtime, uint64_t pool, void *stream, void **captured) {
    uint64_t graph = 0;
    OK(aq_torch_pool_begin(0, pool, 0, belongs, captured, drop));
    OK(aq_sim_capture_begin(runtime, 0, stream));
    void *block = take(MIB, stream);
    touch(runtime, stream, block, MIB, AQ_WRITE);
    aq_torch_free(block, MIB, -1, NULL);
    OK(aq_sim_capture_end(runtime, 0, stream, &graph));
    OK(aq_torch_pool_end(0, pool, 0));
    return graph;
}

/* Work outside of a capture is served from a pool too, and the pool is brought back to a state that it had. */
static void states(aq_runtime runtime, void *stream, void *other) {
    enum { ROOM = 8 };
    void *served[] = {stream, NULL};
    aq_torch_block state[ROOM], now[ROOM], all[ROOM];
    size_t count = 99;
    OK(aq_torch_pool_blocks(0, 9, 1, now, ROOM, &count));
    CHECK(count == 0);
    ANSWERS(AQ_ERROR_NULL, aq_torch_pool_blocks(0, 9, 1, now, ROOM, NULL));
    OK(aq_torch_pool_begin(0, 9, 1, belongs, served, drop));
    void *x = take(700, stream), *y = take(3 * MIB, stream), *elsewhere = take(MIB, other);
    touch(runtime, stream, x, 700, AQ_WRITE);
    touch(runtime, stream, y, 3 * MIB, AQ_WRITE);
    OK(aq_torch_pool_end(0, 9, 1));
    OK(aq_torch_pool_blocks(0, 9, 1, NULL, 0, &count));
    CHECK(count == 2);
    ANSWERS(AQ_ERROR_NULL, aq_torch_pool_blocks(0, 9, 1, NULL, 1, &count));
    OK(aq_torch_pool_blocks(0, 9, 1, state, ROOM, &count));
    CHECK(count == 2 && state[0].stream == stream && state[0].first == 9 && state[0].second == 1);
    const aq_torch_block *small = &state[state[0].bytes != 700];
    CHECK(small->bytes == 700 && small->address == (uint64_t)(uintptr_t)x);
    OK(aq_torch_blocks(0, all, ROOM, &count));
    CHECK(count == 3);
    size_t unnamed = 0;
    for (size_t n = 0; n < count; n++) {
        if (all[n].first == 0 && all[n].second == 0) {
            CHECK(all[n].address == (uint64_t)(uintptr_t)elsewhere && all[n].stream == other && all[n].bytes == MIB);
            unnamed++;
        }
    }
    CHECK(unnamed == 1);

    ANSWERS(AQ_ERROR_BUSY, aq_torch_pool_place(0, small));
    aq_torch_free(x, 700, -1, NULL);
    aq_torch_free(y, 3 * MIB, -1, NULL);
    OK(aq_torch_pool_blocks(0, 9, 1, now, ROOM, &count));
    CHECK(count == 0);
    for (int n = 0; n < 2; n++) {
        OK(aq_torch_pool_place(0, &state[n]));
    }
    OK(aq_torch_pool_blocks(0, 9, 1, now, ROOM, &count));
    CHECK(count == 2 && memcmp(now, state, 2 * sizeof *state) == 0);
    touch(runtime, stream, y, 3 * MIB, AQ_READ);

    aq_torch_block wrong = state[0];
    wrong.first = 8;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pool_place(0, &wrong));
    wrong = state[0];
    wrong.address = 512;
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_torch_pool_place(0, &wrong));
    ANSWERS(AQ_ERROR_NULL, aq_torch_pool_place(0, NULL));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_torch_pool_place(-1, &state[0]));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pool_place(7, &state[0]));
    aq_torch_free(x, 700, -1, NULL);
    aq_torch_free(y, 3 * MIB, -1, NULL);
    aq_torch_free(elsewhere, MIB, -1, NULL);
    OK(aq_torch_pool_release(0, 9, 1));
}

/* The free memory of a pool that no program holds, and that nothing captured has used, serves others. That of a pool that
 * is held serves them when there is no other memory, if it was asked to, and is the pool's again. */
static void last_resort(aq_runtime runtime, void *stream, void *other) {
    void *served[] = {stream, NULL}, *memory = NULL;
    uint64_t limit = 0;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pool_use_on_oom(0, 5, 1, 1));
    OK(aq_torch_pool_use_on_oom(0, 5, 1, 0));
    OK(aq_torch_reset());
    OK(aq_limit(runtime, 0, &limit, NULL));
    OK(aq_set_limit(runtime, 0, stats_of(runtime, 0).physical + 16 * MIB, NULL));
    OK(aq_torch_pool_begin(0, 4, 1, belongs, served, drop));
    aq_torch_free(take(8 * MIB, stream), 8 * MIB, -1, NULL);
    OK(aq_torch_pool_end(0, 4, 1));
    aq_torch_free(take(14 * MIB, other), 14 * MIB, -1, NULL);
    OK(aq_torch_pool_release(0, 4, 1));
    OK(aq_torch_reset());

    OK(aq_torch_pool_retain(0, 5, 1));
    OK(aq_torch_pool_begin(0, 5, 1, belongs, served, drop));
    void *spare = take(8 * MIB, stream);
    touch(runtime, stream, spare, 8 * MIB, AQ_WRITE);
    OK(aq_torch_pool_end(0, 5, 1));
    void *rest = take(8 * MIB, other);
    aq_torch_free(spare, 8 * MIB, -1, NULL);
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc(6 * MIB, 0, other, &memory));
    OK(aq_torch_pool_use_on_oom(0, 5, 1, 1));
    OK(aq_torch_pool_use_on_oom(0, 5, 1, 1));
    for (int n = 0; n < 3; n++) {
        memory = take(6 * MIB, other);
        CHECK(memory == spare);
        touch(runtime, other, memory, 6 * MIB, AQ_WRITE);
        void *none = NULL;
        ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc(6 * MIB, 0, other, &none));
        aq_torch_free(memory, 6 * MIB, -1, NULL);
    }
    /* Work that a pool serves finds its own pool alone. */
    OK(aq_torch_pool_begin(0, 6, 1, belongs, served, drop));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc(6 * MIB, 0, stream, &memory));
    OK(aq_torch_pool_end(0, 6, 1));
    OK(aq_torch_pool_release(0, 6, 1));
    OK(aq_torch_pool_use_on_oom(0, 5, 1, 0));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc(6 * MIB, 0, other, &memory));
    OK(aq_torch_pool_use_on_oom(0, 5, 1, 1));
    OK(aq_torch_pool_release(0, 5, 1));
    OK(aq_torch_pool_release(0, 5, 1));
    /* The pool is gone, and its memory is all other work's. */
    memory = take(8 * MIB, other);
    aq_torch_free(memory, 8 * MIB, -1, NULL);
    aq_torch_free(rest, 8 * MIB, -1, NULL);
    OK(aq_set_limit(runtime, 0, limit, NULL));
}

int main(void) {
    aq_runtime_options options = simulated(1);
    options.streams = AQ_STREAMS_RETIRED;
    options.sim_seed = 9;
    OK(aq_torch_setup(&options));
    aq_runtime runtime = 0;
    OK(aq_torch_runtime(&runtime));
    void *stream = stream_of(runtime, 0), *other = stream_of(runtime, 0);
    void *captured[] = {stream, NULL, NULL};
    int uses = -1;

    ANSWERS(AQ_ERROR_NULL, aq_torch_pool_begin(0, 1, 0, NULL, captured, drop));
    CHECK(drops == 1);
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_torch_pool_begin(3, 1, 0, belongs, captured, drop));
    CHECK(drops == 2);
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pool_end(0, 1, 0));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pool_release(0, 1, 0));
    OK(aq_torch_pool_uses(0, 1, 0, &uses));
    CHECK(uses == 0);

    /* What another stream frees while it is captured is served there. The graph's own memory
     * stays with the graph. */
    void *in = take(MIB, stream), *outside = take(MIB, other);
    touch(runtime, stream, in, MIB, AQ_WRITE);
    OK(aq_sim_stream_synchronize(runtime, 0, stream));
    drops = 0;
    OK(aq_torch_pool_begin(0, 1, 0, belongs, captured, drop));
    ANSWERS(AQ_ERROR_BUSY, aq_torch_pool_begin(0, 1, 0, belongs, captured, drop));
    CHECK(drops == 1);
    OK(aq_sim_capture_begin(runtime, 0, stream));
    void *x = take(MIB, stream);
    touch(runtime, stream, in, MIB, AQ_READ);
    touch(runtime, stream, x, MIB, AQ_WRITE);
    aq_torch_free(outside, MIB, -1, NULL);
    outside = take(2 * MIB, other);
    touch(runtime, other, outside, 2 * MIB, AQ_WRITE);
    void *out = take(MIB, stream);
    touch(runtime, stream, x, MIB, AQ_READ);
    touch(runtime, stream, out, MIB, AQ_WRITE);
    aq_torch_free(x, MIB, -1, NULL);
    /* What does not fit is refused as ever, and breaks no capture. */
    void *none = NULL;
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc((ptrdiff_t)1 << 42, 0, stream, &none));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_malloc((ptrdiff_t)512 * MIB, 0, stream, &none));
    uint64_t graph = 0;
    OK(aq_sim_capture_end(runtime, 0, stream, &graph));
    OK(aq_torch_pool_end(0, 1, 0));
    CHECK(drops == 2 && asked > 0);
    OK(aq_torch_pool_uses(0, 1, 0, &uses));
    CHECK(uses == 1);

    /* Each launch writes what was freed in the capture, so it is not served. */
    for (int n = 0; n < 200; n++) {
        OK(aq_sim_graph_launch(runtime, 0, graph, stream));
        void *mine = take(MIB, stream), *theirs = take((uint64_t)(1 + n % 5) * MIB, other);
        CHECK(mine != x && theirs != x);
        touch(runtime, stream, mine, MIB, AQ_WRITE);
        touch(runtime, other, theirs, MIB, AQ_WRITE);
        aq_torch_free(mine, MIB, -1, NULL);
        aq_torch_free(theirs, MIB, -1, NULL);
        if (n % 50 == 49) {
            OK(aq_torch_reset());
        }
    }

    /* Another graph that shares the pool. */
    OK(aq_torch_pool_retain(0, 1, 0));
    OK(aq_sim_stream_synchronize(runtime, 0, stream));
    uint64_t second = temporary(runtime, 1, stream, captured);
    OK(aq_torch_pool_uses(0, 1, 0, &uses));
    CHECK(uses == 3);
    for (int n = 0; n < 20; n++) {
        OK(aq_sim_graph_launch(runtime, 0, n % 2 ? second : graph, stream));
    }

    /* A stream that is first heard of while it is captured. */
    void *late = captured[1] = stream_of(runtime, 0);
    uint64_t third = temporary(runtime, 2, late, captured);
    OK(aq_sim_graph_launch(runtime, 0, third, late));
    OK(aq_sim_stream_synchronize(runtime, 0, late));
    OK(aq_sim_graph_destroy(runtime, 0, third));
    OK(aq_torch_pool_release(0, 2, 0));
    OK(aq_stream_retire(runtime, 0, late));

    /* It stays while it has a user, and while a block of it is out. */
    OK(aq_sim_stream_synchronize(runtime, 0, stream));
    OK(aq_sim_stream_synchronize(runtime, 0, other));
    aq_torch_free(outside, MIB, -1, NULL);
    OK(aq_torch_pool_release(0, 1, 0));
    OK(aq_torch_pool_release(0, 1, 0));
    OK(aq_torch_reset());
    CHECK(stats_of(runtime, 0).physical > 0);
    OK(aq_sim_graph_launch(runtime, 0, graph, stream));
    OK(aq_sim_graph_destroy(runtime, 0, graph));
    OK(aq_sim_graph_destroy(runtime, 0, second));
    aq_torch_free(in, MIB, -1, NULL);
    OK(aq_torch_pool_release(0, 1, 0));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pool_release(0, 1, 0));
    CHECK(stats_of(runtime, 0).physical > 0);
    aq_torch_free(out, MIB, -1, NULL);
    OK(aq_torch_reset());
    OK(aq_torch_reset());
    CHECK(stats_of(runtime, 0).physical == 0);

    states(runtime, stream, other);
    last_resort(runtime, stream, other);
    in_order(runtime, 1);
    OK(aq_stream_retire(runtime, 0, stream));
    OK(aq_stream_retire(runtime, 0, other));
    OK(aq_runtime_destroy(runtime));
    puts("graphs: captured memory is not served to others until its pool has no users");
    return 0;
}
