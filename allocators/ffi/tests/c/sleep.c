/* Memory of regions on two devices: it goes back while the process sleeps, and returns as a whole, or not at all. */
#include "check.h"

#define MIB (1u << 20)

static void *take(uint64_t bytes, int device, void *stream) {
    void *memory = NULL;
    OK(aq_torch_malloc((ptrdiff_t)bytes, device, stream, &memory));
    return memory;
}

static uint64_t at(const void *memory) {
    return (uint64_t)(uintptr_t)memory;
}

static uint64_t used(aq_runtime runtime, uint32_t device) {
    uint64_t bytes = 0;
    OK(aq_limit(runtime, device, NULL, &bytes));
    return bytes;
}

static int paused(const char *tag) {
    int is = -1;
    uint64_t held = 1;
    OK(aq_torch_tag(tag, &held, &is));
    CHECK(is == 0 || held == 0);
    return is;
}

static void refusals(void) {
    const char *tags[] = {"weights", NULL}, *broken[] = {"\xff"};
    uint32_t keep[] = {AQ_KEEP_NONE, AQ_KEEP_NONE}, beyond[] = {AQ_KEEP_DISK + 1};
    uint64_t bytes = 7;
    int found = 1;
    ANSWERS(AQ_ERROR_NULL, aq_torch_pause(NULL, keep, 1, NULL, NULL));
    ANSWERS(AQ_ERROR_NULL, aq_torch_pause(tags, NULL, 1, NULL, NULL));
    ANSWERS(AQ_ERROR_NULL, aq_torch_pause(tags, keep, 2, NULL, &bytes));
    ANSWERS(AQ_ERROR_NULL, aq_torch_resume(NULL, 1, 0, NULL));
    ANSWERS(AQ_ERROR_NULL, aq_torch_tag(NULL, NULL, NULL));
    ANSWERS(AQ_ERROR_NULL, aq_torch_backup(tags, 1, &bytes, NULL));
    ANSWERS(AQ_ERROR_NULL, aq_torch_backup(tags, 1, NULL, &found));
    OK(aq_torch_backup(tags, 1, &bytes, &found));
    CHECK(!found);
    ANSWERS(AQ_ERROR_NULL, aq_torch_pool_tag(0, 1, 1, NULL));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pause(tags, beyond, 1, NULL, &bytes));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_pause(broken, keep, 1, NULL, &bytes));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_torch_region(broken[0]));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_torch_pool_tag(9, 1, 1, "weights"));
    CHECK(bytes == 7);
    OK(aq_torch_pause(NULL, NULL, 0, NULL, &bytes));
    CHECK(bytes == 0);
    OK(aq_torch_resume(tags, 1, 0, &bytes));
    CHECK(bytes == 0 && !paused("weights"));
}

int main(void) {
    aq_runtime_options options = simulated(2);
    options.streams = AQ_STREAMS_RETIRED;
    /* Queued work runs late, so that a pause has something to wait for. */
    options.sim_seed = 11;
    OK(aq_torch_setup(&options));
    aq_runtime runtime = 0;
    OK(aq_torch_runtime(&runtime));
    refusals();

    void *streams[2], *others[2], *weights[2], *cache[2], *outside[2];
    char bytes[4096], back[sizeof bytes];
    memset(bytes, 0x5a, sizeof bytes);
    for (int device = 0; device < 2; device++) {
        streams[device] = stream_of(runtime, (uint32_t)device);
        others[device] = stream_of(runtime, (uint32_t)device);
    }
    for (uint32_t keep = AQ_KEEP_NONE; keep <= AQ_KEEP_DISK; keep++) {
        for (int device = 0; device < 2; device++) {
            OK(aq_torch_region("weights"));
            weights[device] = take(40 * MIB, device, streams[device]);
            OK(aq_torch_region("cache"));
            cache[device] = take(30 * MIB, device, streams[device]);
            OK(aq_torch_region(NULL));
            outside[device] = take(MIB, device, streams[device]);
            uint32_t number = (uint32_t)device;
            OK(aq_upload(runtime, number, at(weights[device]), 12345, bytes, sizeof bytes, streams[device]));
            /* Ordered by the program, and recorded nowhere. */
            OK(aq_sim_stream_wait(runtime, number, others[device], streams[device]));
            OK(aq_sim_touch(runtime, number, others[device], at(weights[device]), MIB, AQ_READ));
            OK(aq_sim_touch(runtime, number, streams[device], at(cache[device]), 30 * MIB, AQ_WRITE));
        }
        const char *tags[] = {"weights", "cache"};
        uint32_t kept[] = {keep, AQ_KEEP_NONE};
        uint64_t before[] = {used(runtime, 0), used(runtime, 1)}, released = 0, taken = 0;
        OK(aq_torch_pause(tags, kept, 2, NULL, &released));
        CHECK(released >= 140 * MIB && paused("weights") && paused("cache"));
        OK(aq_torch_pause(tags, kept, 2, NULL, &taken));
        CHECK(taken == 0);
        for (int device = 0; device < 2; device++) {
            uint32_t number = (uint32_t)device;
            ANSWERS(AQ_ERROR_PARKED, aq_download(runtime, number, at(weights[device]), 0, back, 1, streams[device]));
            OK(aq_sim_touch(runtime, number, streams[device], at(outside[device]), MIB, AQ_WRITE));
        }
        int found = -1;
        OK(aq_torch_backup((char *)weights[1] + 12345, sizeof bytes, back, &found));
        CHECK(found == (keep != AQ_KEEP_NONE) && (!found || memcmp(back, bytes, sizeof bytes) == 0));
        OK(aq_torch_region("weights"));
        void *none = NULL;
        ANSWERS(AQ_ERROR_PARKED, aq_torch_malloc(512, 0, streams[0], &none));
        OK(aq_torch_region(""));

        /* The second device has no room for the second tag: what was resumed before it is parked again. */
        void *big = take(200 * MIB, 1, streams[1]);
        uint64_t full[] = {used(runtime, 0), used(runtime, 1)};
        for (int n = 0; n < 2; n++) {
            ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_torch_resume(tags, 2, 0, &taken));
            CHECK(paused("weights") && paused("cache"));
            CHECK(used(runtime, 0) == full[0] && used(runtime, 1) == full[1]);
        }
        OK(aq_torch_free(big, 0, -1, NULL));
        OK(aq_torch_reset());
        OK(aq_torch_resume(tags, 2, 0, &taken));
        CHECK(taken == released && !paused("weights") && !paused("cache"));
        for (int device = 0; device < 2; device++) {
            uint32_t number = (uint32_t)device;
            CHECK(used(runtime, number) <= before[device]);
            if (keep != AQ_KEEP_NONE) {
                memset(back, 0, sizeof back);
                OK(aq_download(runtime, number, at(weights[device]), 12345, back, sizeof back, streams[device]));
                CHECK(memcmp(back, bytes, sizeof back) == 0);
            }
            OK(aq_sim_touch(runtime, number, streams[device], at(cache[device]), 30 * MIB, AQ_WRITE));
            void *all[] = {weights[device], cache[device], outside[device]};
            for (int n = 0; n < 3; n++) {
                OK(aq_torch_free(all[n], 0, -1, NULL));
            }
        }
    }
    OK(aq_torch_reset());
    in_order(runtime, 2);
    OK(aq_runtime_destroy(runtime));
    return 0;
}
