/* Whose memory it is when: streams of another library, with and without a promise, default streams, uses on other streams.
 * The simulated device objects to every access that is in no order. */
#include "check.h"

static void touch(aq_runtime runtime, void *stream, uint64_t address, uint64_t bytes, uint32_t access) {
    OK(aq_sim_touch(runtime, 0, stream, address, bytes, access));
}

/* A block that another stream reads is freed meanwhile; the next block must not have its memory before. */
static uint64_t read_by_another(int record) {
    aq_runtime_options options = simulated(1);
    options.streams = AQ_STREAMS_RETIRED;
    options.sim_seed = 7;
    options.wait_ns = 1000000;
    aq_runtime runtime = create(&options);
    void *stream = stream_of(runtime, 0), *other = stream_of(runtime, 0);
    uint64_t violations = 0;
    for (int n = 0; n < 50; n++) {
        uint64_t block = alloc(runtime, 0, 1u << 20, stream);
        touch(runtime, stream, block, 1u << 20, AQ_WRITE);
        OK(aq_sim_stream_wait(runtime, 0, other, stream));
        touch(runtime, other, block, 1u << 20, AQ_READ);
        if (record) OK(aq_record_use(runtime, 0, block, other, AQ_READ));
        OK(aq_free(runtime, 0, block));
        block = alloc(runtime, 0, 1u << 20, stream);
        touch(runtime, stream, block, 1u << 20, AQ_WRITE);
        /* Freed by the other: all in one. */
        OK(aq_sim_stream_wait(runtime, 0, other, stream));
        touch(runtime, other, block, 1u << 20, AQ_WRITE);
        if (record) {
            OK(aq_free_on(runtime, 0, block, other));
        } else {
            OK(aq_free(runtime, 0, block));
        }
    }
    OK(aq_sim_stream_synchronize(runtime, 0, other));
    OK(aq_sim_violations(runtime, &violations, NULL));
    if (record) in_order(runtime, 1);
    OK(aq_stream_retire(runtime, 0, stream));
    /* Nothing else has told the runtime of it. */
    ANSWERS(record ? AQ_OK : AQ_ERROR_UNKNOWN_STREAM, aq_stream_retire(runtime, 0, other));
    OK(aq_runtime_destroy(runtime));
    return violations;
}

/* Streams that are destroyed without a word, and whose numbers come back as other streams. */
static void untold_streams(void) {
    aq_runtime_options options = simulated(1);
    options.sim_seed = 11;
    aq_runtime runtime = create(&options);
    for (int n = 0; n < 100; n++) {
        void *stream = stream_of(runtime, 0);
        uint64_t one = alloc(runtime, 0, 2u << 20, stream), two = alloc(runtime, 0, 4096, stream);
        touch(runtime, stream, one, 2u << 20, AQ_WRITE);
        touch(runtime, stream, two, 4096, AQ_WRITE);
        OK(aq_free(runtime, 0, one));
        uint64_t again = alloc(runtime, 0, 2u << 20, stream);
        touch(runtime, stream, again, 2u << 20, AQ_WRITE);
        OK(aq_free(runtime, 0, again));
        OK(aq_free(runtime, 0, two));
        OK(aq_sim_stream_destroy(runtime, 0, stream));
    }
    /* What was free on those that are gone served those that came. */
    CHECK(stats_of(runtime, 0).peak_physical < 64u << 20);
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
}

/* A promise spares the events, and retiring hands on what is free. */
static void promised_streams(void) {
    aq_runtime_options options = simulated(1);
    aq_runtime runtime = create(&options);
    for (int n = 0; n < 20; n++) {
        void *stream = stream_of(runtime, 0);
        OK(aq_stream_register(runtime, 0, stream));
        OK(aq_stream_register(runtime, 0, stream));
        uint64_t before = stats_of(runtime, 0).fences;
        for (int m = 0; m < 100; m++) {
            uint64_t block = alloc(runtime, 0, 8u << 20, stream);
            touch(runtime, stream, block, 8u << 20, AQ_WRITE);
            OK(aq_free(runtime, 0, block));
        }
        CHECK(stats_of(runtime, 0).fences <= before + 2);
        OK(aq_stream_retire(runtime, 0, stream));
        OK(aq_sim_stream_destroy(runtime, 0, stream));
        ANSWERS(AQ_ERROR_UNKNOWN_STREAM, aq_stream_retire(runtime, 0, stream));
        uint64_t address = 0;
        ANSWERS(AQ_ERROR_UNKNOWN_STREAM, aq_alloc(runtime, 0, 512, stream, &address));
    }
    /* One stream's memory served them all. */
    CHECK(stats_of(runtime, 0).peak_physical < 64u << 20);

    /* The promise may come late. */
    void *late = stream_of(runtime, 0);
    uint64_t block = alloc(runtime, 0, 4096, late);
    touch(runtime, late, block, 4096, AQ_WRITE);
    OK(aq_stream_register(runtime, 0, late));
    OK(aq_free(runtime, 0, alloc(runtime, 0, 4096, late)));
    OK(aq_free(runtime, 0, block));
    OK(aq_stream_retire(runtime, 0, late));
    ANSWERS(AQ_ERROR_UNKNOWN_STREAM, aq_stream_register(runtime, 0, (void *)0xdead0));
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
}

static void default_streams(void) {
    aq_runtime_options options = simulated(1);
    options.sim_seed = 3;
    aq_runtime runtime = create(&options);
    void *const defaults[] = {NULL, (void *)1, (void *)2};
    for (int n = 0; n < 60; n++) {
        void *stream = defaults[n % 3];
        uint64_t block = alloc(runtime, 0, 1u << 20, stream);
        touch(runtime, stream, block, 1u << 20, AQ_WRITE);
        OK(aq_free(runtime, 0, block));
    }
    /* 0 and 1 are one stream: memory freed on one serves the other at once. */
    uint64_t block = alloc(runtime, 0, 3u << 20, NULL);
    OK(aq_free(runtime, 0, block));
    CHECK(alloc(runtime, 0, 3u << 20, (void *)1) == block);
    OK(aq_free(runtime, 0, block));
    for (int n = 0; n < 3; n++) OK(aq_stream_register(runtime, 0, defaults[n]));
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
}

int main(void) {
    CHECK(read_by_another(1) == 0);
    /* The device does look. */
    CHECK(read_by_another(0) > 0);
    untold_streams();
    promised_streams();
    default_streams();
    puts("order: no access out of order, and the one that was meant was seen");
    return 0;
}
