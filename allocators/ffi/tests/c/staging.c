/* Pageable memory to the device and back, waited for and by ticket; pinned memory. */
#include "check.h"

#define MIB (1u << 20)

static unsigned char *filled(size_t bytes, unsigned seed) {
    unsigned char *memory = malloc(bytes);
    CHECK(memory != NULL);
    for (size_t at = 0; at < bytes; at++) {
        seed = seed * 1664525u + 1013904223u;
        memory[at] = (unsigned char)(seed >> 24);
    }
    return memory;
}

static void there_and_back(aq_runtime runtime, void *stream) {
    static const size_t sizes[] = {1, 511, 24576, 24577, 300000, 5 * MIB + 3, 20 * MIB};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        size_t bytes = sizes[n];
        unsigned char *up = filled(bytes, (unsigned)n), *down = filled(bytes, 99);
        uint64_t block = alloc(runtime, 0, bytes + 100, stream);
        OK(aq_upload(runtime, 0, block, 50, up, bytes, stream));
        OK(aq_download(runtime, 0, block, 50, down, bytes, stream));
        CHECK(memcmp(up, down, bytes) == 0);

        memset(down, 0, bytes);
        aq_ticket ticket = 0;
        up[0] ^= 0xff;
        OK(aq_upload_begin(runtime, 0, block, 50, up, bytes, stream, &ticket));
        CHECK(ticket != 0);
        aq_status status;
        while ((status = aq_ticket_poll(ticket)) == AQ_NOT_READY) {
        }
        CHECK(status == AQ_OK);
        OK(aq_ticket_wait(ticket));
        OK(aq_ticket_free(ticket));
        ANSWERS(AQ_ERROR_UNKNOWN_TICKET, aq_ticket_wait(ticket));
        ANSWERS(AQ_ERROR_UNKNOWN_TICKET, aq_ticket_free(ticket));
        OK(aq_download_begin(runtime, 0, block, 50, down, bytes, stream, &ticket));
        OK(aq_ticket_wait(ticket));
        OK(aq_ticket_wait(ticket));
        OK(aq_ticket_free(ticket));
        CHECK(memcmp(up, down, bytes) == 0);
        OK(aq_free(runtime, 0, block));
        free(up);
        free(down);
    }
}

static void what_is_wrong(aq_runtime runtime, void *stream) {
    unsigned char byte[16] = {0};
    aq_ticket ticket = 77;
    uint64_t block = alloc(runtime, 0, 1000, stream);
    ANSWERS(AQ_ERROR_NULL, aq_upload(runtime, 0, block, 0, NULL, 16, stream));
    ANSWERS(AQ_ERROR_NULL, aq_download(runtime, 0, block, 0, NULL, 16, stream));
    ANSWERS(AQ_ERROR_NULL, aq_upload_begin(runtime, 0, block, 0, byte, 16, stream, NULL));
    ANSWERS(AQ_ERROR_OUT_OF_BOUNDS, aq_upload(runtime, 0, block, 985, byte, 16, stream));
    ANSWERS(AQ_ERROR_OUT_OF_BOUNDS, aq_upload(runtime, 0, block, UINT64_MAX, byte, 16, stream));
    ANSWERS(AQ_ERROR_OUT_OF_BOUNDS, aq_download(runtime, 0, block, 0, byte, UINT64_MAX, stream));
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_upload(runtime, 0, 512, 0, byte, 16, stream));
    ANSWERS(AQ_ERROR_UNKNOWN_STREAM, aq_upload(runtime, 0, block, 0, byte, 16, (void *)0xdead0));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_upload(runtime, 4, block, 0, byte, 16, stream));
    ANSWERS(AQ_ERROR_OUT_OF_BOUNDS, aq_upload_begin(runtime, 0, block, 985, byte, 16, stream, &ticket));
    CHECK(ticket == 77);
    OK(aq_upload(runtime, 0, block, 0, byte, 0, stream));
    OK(aq_upload(runtime, 0, block, 1000, NULL, 0, stream));
    OK(aq_upload_begin(runtime, 0, block, 0, byte, 0, stream, &ticket));
    OK(aq_ticket_poll(ticket));
    OK(aq_ticket_free(ticket));
    OK(aq_ticket_free(0));
    ANSWERS(AQ_ERROR_UNKNOWN_TICKET, aq_ticket_poll(0));
    OK(aq_free(runtime, 0, block));
    ANSWERS(AQ_ERROR_DOUBLE_FREE, aq_upload(runtime, 0, block, 0, byte, 16, stream));
}

/* A block freed, a ticket freed, a runtime destroyed while a transfer is under way: none is touched after its end. */
static void ends_in_the_middle(void) {
    aq_runtime_options options = simulated(1);
    for (int n = 0; n < 12; n++) {
        aq_runtime runtime = create(&options);
        void *stream = stream_of(runtime, 0);
        unsigned char *host = filled(16 * MIB, 5);
        uint64_t block = alloc(runtime, 0, 16 * MIB, stream), count = 0;
        aq_ticket ticket = 0;
        OK(n % 2 ? aq_upload_begin(runtime, 0, block, 0, host, 16 * MIB, stream, &ticket)
                 : aq_download_begin(runtime, 0, block, 0, host, 16 * MIB, stream, &ticket));
        OK(aq_free(runtime, 0, block));
        uint64_t next = alloc(runtime, 0, 16 * MIB, stream);
        OK(aq_sim_touch(runtime, 0, stream, next, 16 * MIB, AQ_WRITE));
        if (n % 3 == 0) {
            OK(aq_ticket_wait(ticket));
        } else if (n % 3 == 1) {
            OK(aq_free(runtime, 0, next));
            OK(aq_sim_violations(runtime, &count, NULL));
            OK(aq_runtime_destroy(runtime));
        }
        OK(aq_ticket_free(ticket));
        memset(host, 0, 16 * MIB);
        free(host);
        if (n % 3 != 1) {
            OK(aq_free(runtime, 0, next));
            in_order(runtime, 1);
            OK(aq_runtime_destroy(runtime));
        }
        CHECK(count == 0);
    }
}

/* A copy comes after what is queued on the stream that it is asked on, whichever stream the block belongs to. */
static void behind_its_stream(uint32_t streams) {
    aq_runtime_options options = simulated(1);
    options.sim_seed = 17;
    options.streams = streams;
    aq_runtime runtime = create(&options);
    void *home = stream_of(runtime, 0), *other = stream_of(runtime, 0);
    static const size_t sizes[] = {4096, 200000, 9 * MIB};
    for (int n = 0; n < 30; n++) {
        size_t bytes = sizes[n % 3];
        unsigned char *host = filled(bytes, 1);
        uint64_t block = alloc(runtime, 0, bytes, home);
        OK(aq_sim_touch(runtime, 0, home, block, bytes, AQ_WRITE));
        OK(aq_sim_stream_wait(runtime, 0, other, home));
        OK(aq_sim_touch(runtime, 0, other, block, bytes, AQ_WRITE));
        OK(aq_record_use(runtime, 0, block, other, AQ_WRITE));
        OK(n % 2 ? aq_download(runtime, 0, block, 0, host, bytes, other)
                 : aq_upload(runtime, 0, block, 0, host, bytes, other));
        OK(aq_sim_touch(runtime, 0, other, block, bytes, AQ_WRITE));
        OK(aq_free_on(runtime, 0, block, other));
        free(host);
    }
    in_order(runtime, 1);
    OK(aq_stream_retire(runtime, 0, home));
    OK(aq_stream_retire(runtime, 0, other));
    OK(aq_runtime_destroy(runtime));
}

static void pinned(void) {
    aq_runtime_options options = simulated(1);
    aq_runtime runtime = create(&options);
    void *stream = stream_of(runtime, 0);
    void *memory = NULL, *kept = (void *)&memory;
    int is_pinned = 0;
    uint64_t given = 0, limit = 0, used = 0;
    aq_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    for (uint64_t bytes = 1; bytes <= 8 * MIB; bytes *= 8) {
        OK(aq_pinned_alloc(runtime, 0, bytes, bytes < 4096 ? 0 : 4096, &memory));
        CHECK((uintptr_t)memory % (bytes < 4096 ? 64 : 4096) == 0);
        memset(memory, 0x5a, (size_t)bytes);
        OK(aq_pinned_is_pinned(memory, &is_pinned));
        CHECK(is_pinned == 1);
        OK(aq_pinned_record_use(memory, runtime, 0, stream));
        OK(aq_pinned_free(memory));
        ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_pinned_free(memory));
        ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_pinned_record_use(memory, runtime, 0, stream));
        ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_pinned_is_pinned(memory, &is_pinned));
    }
    OK(aq_pinned_limit(runtime, &limit, &used));
    CHECK(used > 0 && used <= limit);
    OK(aq_pinned_trim(runtime, 0, 0, &given));
    CHECK(given == used);
    memory = kept;
    ANSWERS(AQ_ERROR_NULL, aq_pinned_alloc(runtime, 0, 1, 0, NULL));
    ANSWERS(AQ_ERROR_ZERO_SIZE, aq_pinned_alloc(runtime, 0, 0, 0, &memory));
    ANSWERS(AQ_ERROR_TOO_LARGE, aq_pinned_alloc(runtime, 0, UINT64_MAX, 0, &memory));
    ANSWERS(AQ_ERROR_BAD_ALIGNMENT, aq_pinned_alloc(runtime, 0, 64, 3, &memory));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_pinned_alloc(runtime, 0, 1u << 30, 0, &memory));
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_pinned_free(kept));
    OK(aq_pinned_free(NULL));
    CHECK(memory == kept);
    OK(aq_pinned_stats(runtime, 0, &stats));
    CHECK(stats.requested == 0 && stats.allocations == 8);
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
}

int main(void) {
    aq_runtime_options options = simulated(1);
    aq_runtime runtime = create(&options);
    void *stream = stream_of(runtime, 0);
    there_and_back(runtime, stream);
    OK(aq_stream_register(runtime, 0, stream));
    there_and_back(runtime, stream);
    there_and_back(runtime, NULL);
    there_and_back(runtime, (void *)2);
    what_is_wrong(runtime, stream);
    OK(aq_stream_retire(runtime, 0, stream));
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
    pinned();
    behind_its_stream(AQ_STREAMS_UNTOLD);
    behind_its_stream(AQ_STREAMS_RETIRED);
    ends_in_the_middle();
    puts("staging: every byte there and back, and nothing touched after its end");
    return 0;
}
