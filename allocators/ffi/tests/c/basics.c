/* Each function once as it is meant, and once with everything that can be wrong with it: a code, a text, and nothing lost. */
#include "check.h"
#include <unistd.h>

static void versions(void) {
    CHECK(aq_version() == ((uint32_t)AQ_VERSION_MAJOR << 16 | AQ_VERSION_MINOR));
    CHECK(strcmp(aq_status_name(AQ_OK), "AQ_OK") == 0);
    CHECK(strcmp(aq_status_name(AQ_ERROR_OTHER), "AQ_ERROR_OTHER") == 0);
    CHECK(strcmp(aq_status_name(-1), "unknown status") == 0);
    CHECK(aq_last_error()[0] == 0);
    aq_text_free(NULL);
}

static void options_of_other_versions(void) {
    aq_runtime runtime = 77;
    aq_runtime_options options = simulated(1);
    ANSWERS(AQ_ERROR_NULL, aq_runtime_create(&options, NULL));
    options.size = 0;
    ANSWERS(AQ_ERROR_VERSION, aq_runtime_create(&options, &runtime));
    options.size = sizeof options;
    options.driver = 9;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    CHECK(strstr(aq_last_error(), "options->driver is 9") != NULL);
    CHECK(strstr(aq_last_error(), "AQ_DRIVER_MACHINE (0), AQ_DRIVER_SIM (1)") != NULL);
    options.driver = AQ_DRIVER_SIM;
    options.streams = 2;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    options.streams = AQ_STREAMS_UNTOLD;
    options.sim_flags = 4;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    /* More devices than a simulated machine can have. */
    options.sim_flags = 0;
    options.sim_devices = 65;
    ANSWERS(AQ_ERROR_BAD_SETTING, aq_runtime_create(&options, &runtime));
    CHECK(strstr(aq_last_error(), "sim_devices") != NULL);
    options.sim_devices = UINT32_MAX;
    ANSWERS(AQ_ERROR_BAD_SETTING, aq_runtime_create(&options, &runtime));
    CHECK(runtime == 77);

    /* A newer caller, whose further fields are zero, and not. */
    struct {
        aq_runtime_options known;
        uint64_t further[2];
    } newer = {simulated(1), {0, 0}};
    newer.known.size = sizeof newer;
    OK(aq_runtime_create(&newer.known, &runtime));
    OK(aq_runtime_destroy(runtime));
    newer.further[1] = 1;
    ANSWERS(AQ_ERROR_VERSION, aq_runtime_create(&newer.known, &runtime));

    /* An older one, whose struct ends after `sim_devices`. */
    unsigned char *older = malloc(offsetof(aq_runtime_options, sim_flags));
    options = simulated(1);
    options.size = offsetof(aq_runtime_options, sim_flags);
    CHECK(older != NULL);
    memcpy(older, &options, options.size);
    OK(aq_runtime_create((const aq_runtime_options *)(const void *)older, &runtime));
    free(older);

    struct {
        aq_stats known;
        uint64_t further;
    } stats;
    memset(&stats, 0xff, sizeof stats);
    stats.known.size = sizeof stats;
    OK(aq_device_stats(runtime, 0, &stats.known));
    CHECK(stats.known.size == sizeof(aq_stats) && stats.further == UINT64_MAX);
    stats.known.size = offsetof(aq_stats, cached);
    stats.known.cached = 5;
    OK(aq_device_stats(runtime, 0, &stats.known));
    CHECK(stats.known.size == offsetof(aq_stats, cached) && stats.known.cached == 5);
    stats.known.size = 0;
    ANSWERS(AQ_ERROR_VERSION, aq_device_stats(runtime, 0, &stats.known));
    ANSWERS(AQ_ERROR_NULL, aq_device_stats(runtime, 0, NULL));
    OK(aq_runtime_destroy(runtime));
}

static void without_a_gpu(void) {
    aq_runtime runtime = 0;
    uint32_t count = 99;
    aq_runtime_options options = simulated(1);
    /* No options: the machine's own driver, whether there is one or not. */
    OK(aq_runtime_create(NULL, &runtime));
    OK(aq_device_count(runtime, &count));
    if (count == 0) {
        uint64_t address = 5;
        ANSWERS(AQ_ERROR_NO_DEVICE, aq_alloc(runtime, 0, 512, NULL, &address));
        ANSWERS(AQ_ERROR_UNSUPPORTED, aq_sim_panic(runtime));
        CHECK(address == 5);
    }
    OK(aq_runtime_destroy(runtime));
    options.driver = AQ_DRIVER_MACHINE_OR_SIM;
    OK(aq_runtime_create(&options, &runtime));
    OK(aq_device_count(runtime, &count));
    CHECK(count > 0);
    OK(aq_runtime_destroy(runtime));
}

static void devices(aq_runtime runtime) {
    uint32_t count = 0;
    aq_device_facts facts;
    memset(&facts, 0, sizeof facts);
    facts.size = sizeof facts;
    OK(aq_device_count(runtime, &count));
    CHECK(count == 2);
    ANSWERS(AQ_ERROR_NULL, aq_device_count(runtime, NULL));
    OK(aq_device(runtime, 1, &facts));
    CHECK(facts.ordinal == 1 && facts.simulated && facts.virtual_memory && facts.granularity == 2u << 20);
    CHECK(facts.major == 9 && facts.minor == 0 && facts.memory >= facts.free_memory && facts.free_memory > 0);
    CHECK(strstr(facts.name, "H200") != NULL && strchr(facts.pci_address, ':') != NULL);
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_device(runtime, 2, &facts));
    ANSWERS(AQ_ERROR_NULL, aq_device(runtime, 0, NULL));
}

static void blocks(aq_runtime runtime) {
    void *stream = stream_of(runtime, 0);
    uint64_t address = 77, asked = 0, capacity = 0;
    uint64_t block = alloc(runtime, 0, 1000, stream);
    OK(aq_block_size(runtime, 0, block, &asked, &capacity));
    CHECK(asked == 1000 && capacity == 1024);
    OK(aq_block_size(runtime, 0, block, NULL, NULL));
    CHECK(stats_of(runtime, 0).blocks == 1 && stats_of(runtime, 0).requested == 1000);
    OK(aq_free(runtime, 0, alloc(runtime, 0, 4096, stream)));
    CHECK(stats_of(runtime, 0).peak_requested == 5096);
    OK(aq_reset_peaks(runtime, 0));
    CHECK(stats_of(runtime, 0).peak_requested == 1000 && stats_of(runtime, 0).peak_live == 1024);
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_reset_peaks(runtime, 2));

    ANSWERS(AQ_ERROR_NULL, aq_alloc(runtime, 0, 512, stream, NULL));
    ANSWERS(AQ_ERROR_TOO_LARGE, aq_alloc(runtime, 0, UINT64_MAX, stream, &address));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_alloc(runtime, 0, (uint64_t)1 << 50, stream, &address));
    ANSWERS(AQ_ERROR_BAD_ALIGNMENT, aq_alloc_aligned(runtime, 0, 512, 3, stream, &address));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_alloc(runtime, 2, 512, stream, &address));
    ANSWERS(AQ_ERROR_UNKNOWN_STREAM, aq_alloc(runtime, 0, 512, (void *)0xdead0, &address));
    CHECK(strstr(aq_last_error(), "0xdead0") != NULL);
    ANSWERS(AQ_ERROR_UNKNOWN_STREAM, aq_alloc(runtime, 1, 512, stream, &address)); /* device 0's */
    CHECK(address == 77);

    /* An empty block is at 0, takes no memory, and may be used and freed like any other. */
    OK(aq_alloc(runtime, 0, 0, stream, &address));
    CHECK(address == 0 && stats_of(runtime, 0).blocks == 1);
    OK(aq_alloc_aligned(runtime, 0, 0, 4096, stream, &address));
    OK(aq_block_size(runtime, 0, address, &asked, &capacity));
    CHECK(address == 0 && asked == 0 && capacity == 0);
    OK(aq_record_use(runtime, 0, address, stream, AQ_READ | AQ_WRITE));
    OK(aq_upload(runtime, 0, address, 0, NULL, 0, stream));
    OK(aq_download(runtime, 0, address, 0, NULL, 0, stream));
    ANSWERS(AQ_ERROR_OUT_OF_BOUNDS, aq_upload(runtime, 0, address, 0, &asked, 8, stream));
    OK(aq_free_on(runtime, 0, address, stream));
    OK(aq_free(runtime, 0, 0));
    address = 77;
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_free(runtime, 0, 0x1234));
    CHECK(strstr(aq_last_error(), "inside") == NULL);
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_free(runtime, 0, block + 512));
    CHECK(strstr(aq_last_error(), "lies 512 bytes inside the block of 1000 bytes at 0x") != NULL);
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_free(runtime, 1, block + 512));
    CHECK(strstr(aq_last_error(), "lies 512 bytes inside") != NULL);
    ANSWERS(AQ_ERROR_WRONG_DEVICE, aq_free(runtime, 1, block));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_free(runtime, 2, block));
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_record_use(runtime, 0, block + 1, stream, AQ_READ));
    ANSWERS(AQ_ERROR_WRONG_DEVICE, aq_record_use(runtime, 1, block, NULL, AQ_READ));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_record_use(runtime, 0, block, stream, 0));
    CHECK(strstr(aq_last_error(), "AQ_READ (1), AQ_WRITE (2)") != NULL);
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_block_size(runtime, 0, 8, &asked, NULL));
    CHECK(stats_of(runtime, 0).blocks == 1);
    OK(aq_free(runtime, 0, block));
    ANSWERS(AQ_ERROR_DOUBLE_FREE, aq_free(runtime, 0, block));
    ANSWERS(AQ_ERROR_DOUBLE_FREE, aq_free_on(runtime, 0, block, stream));
    CHECK(alloc(runtime, 0, 1000, stream) == block);
    OK(aq_free_on(runtime, 0, block, stream));
    OK(aq_free_on(runtime, 0, 0, stream));

    OK(aq_alloc_aligned(runtime, 0, 4096, 1u << 20, stream, &address));
    CHECK(address % (1u << 20) == 0);
    OK(aq_free(runtime, 0, address));
    OK(aq_stream_retire(runtime, 0, stream));
    OK(aq_sim_stream_destroy(runtime, 0, stream));
}

static void limits(aq_runtime runtime) {
    void *stream = stream_of(runtime, 0);
    uint64_t limit = 0, used = 1, excess = 1, given = 0, address = 77;
    OK(aq_limit(runtime, 0, &limit, &used));
    CHECK(limit == 256u << 20 && used == stats_of(runtime, 0).physical);
    OK(aq_limit(runtime, 0, NULL, NULL));
    OK(aq_set_limit(runtime, 0, 64u << 20, &excess));
    CHECK(excess == 0);

    uint64_t block = alloc(runtime, 0, 60u << 20, stream);
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_alloc(runtime, 0, 60u << 20, stream, &address));
    CHECK(address == 77 && stats_of(runtime, 0).failures == 2);
    /* The whole account: what was asked, what refused, what is held, what was tried, what to do. */
    const char *said = aq_last_error();
    CHECK(strstr(said, "out of memory on device 0") && strstr(said, "refused by") && strstr(said, "held"));
    CHECK(strstr(said, "tried") && strstr(said, "do   "));
    /* It stays until the next call that fails. */
    CHECK(stats_of(runtime, 0).blocks == 1 && strstr(aq_last_error(), "out of memory on device 0"));
    OK(aq_set_limit(runtime, 0, 1, &excess));
    CHECK(excess == (60u << 20) - 1);
    OK(aq_set_limit(runtime, 0, 256u << 20, NULL));
    OK(aq_free(runtime, 0, block));
    OK(aq_trim(runtime, 0, 0, &given));
    CHECK(given >= 60u << 20 && stats_of(runtime, 0).physical == 0);
    OK(aq_trim(runtime, 0, 0, NULL));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_trim(runtime, 5, 0, &given));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_set_limit(runtime, 5, 0, NULL));

    /* What the caller allocates itself counts, and free memory of the pool gives way to it. */
    OK(aq_free(runtime, 0, alloc(runtime, 0, 200u << 20, stream)));
    OK(aq_charge(runtime, 0, 40u << 20));
    CHECK(stats_of(runtime, 0).physical >= 200u << 20);
    OK(aq_charge(runtime, 0, 160u << 20));
    OK(aq_limit(runtime, 0, NULL, &used));
    CHECK(used == (200u << 20) + stats_of(runtime, 0).physical && used <= 256u << 20);
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_alloc(runtime, 0, 60u << 20, stream, &address));
    ANSWERS(AQ_ERROR_OUT_OF_BUDGET, aq_charge(runtime, 0, 60u << 20));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_uncharge(runtime, 0, (200u << 20) + 1));
    OK(aq_uncharge(runtime, 0, 50u << 20));
    OK(aq_free(runtime, 0, alloc(runtime, 0, 60u << 20, stream)));
    OK(aq_uncharge(runtime, 0, 150u << 20));
    OK(aq_trim(runtime, 0, 0, NULL));
    OK(aq_limit(runtime, 0, NULL, &used));
    CHECK(used == 0);
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_charge(runtime, 5, 1));

    OK(aq_pinned_limit(runtime, &limit, &used));
    CHECK(limit == 256u << 20 && used == 0);
    OK(aq_set_pinned_limit(runtime, limit, &excess));
    OK(aq_stream_retire(runtime, 0, stream));
    OK(aq_sim_stream_destroy(runtime, 0, stream));
}

static void snapshots(aq_runtime runtime) {
    char *json = NULL;
    uint64_t block = alloc(runtime, 0, 12345, NULL);
    ANSWERS(AQ_ERROR_NULL, aq_snapshot(runtime, NULL));
    OK(aq_snapshot(runtime, &json));
    CHECK(json[0] == '{' && json[strlen(json) - 1] == '}');
    CHECK(strstr(json, "\"format\":\"aquifer-snapshot\"") && strstr(json, "\"requested\":12345"));
    aq_text_free(json);
    OK(aq_free(runtime, 0, block));
}

/* How often `word` is in the file, which must be a whole pickle. */
static int told(const char *path, const char *word) {
    static unsigned char bytes[1 << 16];
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    size_t count = fread(bytes, 1, sizeof bytes, file);
    CHECK(count < sizeof bytes && fclose(file) == 0);
    CHECK(count > 2 && bytes[0] == 0x80 && bytes[1] == 4 && bytes[count - 1] == '.');
    int found = 0;
    for (size_t at = 0; at + strlen(word) <= count; at++) found += memcmp(bytes + at, word, strlen(word)) == 0;
    return found;
}

static void memory_snapshots(void) {
    char path[] = "/tmp/aquifer-basics-XXXXXX";
    int made = mkstemp(path);
    CHECK(made >= 0 && close(made) == 0);
    aq_runtime_options options = simulated(2);
    aq_runtime runtime = create(&options);
    ANSWERS(AQ_ERROR_UNSUPPORTED, aq_memory_snapshot(runtime, 0, path));
    CHECK(strstr(aq_last_error(), "options->history") != NULL);
    OK(aq_runtime_destroy(runtime));

    options.history = UINT64_MAX;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    options.history = 4;
    CHECK(setenv("AQUIFER_TRACE", "/nowhere/trace", 1) == 0);
    ANSWERS(AQ_ERROR_BAD_SETTING, aq_runtime_create(&options, &runtime));
    CHECK(unsetenv("AQUIFER_TRACE") == 0);
    runtime = create(&options);
    /* The first block is older than the last four events, and out all the same; device 1 has nothing of it. */
    uint64_t old = alloc(runtime, 0, 12345, NULL);
    for (int n = 0; n < 4; n++) OK(aq_free(runtime, 0, alloc(runtime, 0, 4096, NULL)));
    for (int n = 0; n < 2; n++) {
        OK(aq_memory_snapshot(runtime, 0, path));
        CHECK(told(path, "free_completed") == 1 && told(path, "active_allocated") == 1);
    }
    OK(aq_memory_snapshot(runtime, 1, path));
    CHECK(told(path, "device_traces") == 1 && told(path, "active_allocated") == 0);
    ANSWERS(AQ_ERROR_NULL, aq_memory_snapshot(runtime, 0, NULL));
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_memory_snapshot(runtime, 2, path));
    ANSWERS(AQ_ERROR_SYSTEM, aq_memory_snapshot(runtime, 0, "/nowhere/memory.pickle"));
    CHECK(strstr(aq_last_error(), "/nowhere/memory.pickle") != NULL);
    OK(aq_free(runtime, 0, old));
    in_order(runtime, 2);
    OK(aq_runtime_destroy(runtime));
    ANSWERS(AQ_ERROR_CLOSED, aq_memory_snapshot(runtime, 0, path));
    CHECK(remove(path) == 0);
}

/* Whether the bytes are in the file. */
static int is_in(const char *path, const void *bytes, size_t count) {
    static unsigned char text[1 << 16];
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    size_t length = fread(text, 1, sizeof text, file);
    CHECK(length < sizeof text && fclose(file) == 0);
    for (size_t at = 0; at + count <= length; at++) {
        if (memcmp(text + at, bytes, count) == 0) return 1;
    }
    return 0;
}

/* That the row of an allocation or a free of a block of so many bytes is in the trace. */
static int traced(const char *path, char op, int id, int bytes) {
    char row[64];
    int length = snprintf(row, sizeof row, ",%c,%d,%d,", op, id, bytes);
    return is_in(path, row, (size_t)length);
}

static void history_and_trace_receive_the_same_events(void) {
    char snapshot[] = "/tmp/aquifer-history-XXXXXX", trace[] = "/tmp/aquifer-trace-XXXXXX";
    int first = mkstemp(snapshot), second = mkstemp(trace);
    CHECK(first >= 0 && close(first) == 0 && second >= 0 && close(second) == 0);
    aq_runtime_options options = simulated(2);
    options.history = 64;
    CHECK(setenv("AQUIFER_TRACE", trace, 1) == 0);
    aq_runtime runtime = create(&options);
    /* Freed, so that only the events of a snapshot have these sizes. */
    const int bytes[] = {0x123457, 0x234567};
    for (uint32_t device = 0; device < 2; device++) {
        OK(aq_free(runtime, device, alloc(runtime, device, (uint64_t)bytes[device], NULL)));
    }
    for (uint32_t device = 0; device < 2; device++) {
        OK(aq_memory_snapshot(runtime, device, snapshot));
        const unsigned char pickled[] = {'J', bytes[device] & 0xff, bytes[device] >> 8 & 0xff, bytes[device] >> 16, 0};
        CHECK(is_in(snapshot, pickled, sizeof pickled));
        CHECK(told(snapshot, "free_completed") == 1);
        int id = (int)device + 1;
        CHECK(traced(trace, 'a', id, bytes[device]) && traced(trace, 'f', id, bytes[device]));
    }
    in_order(runtime, 2);
    OK(aq_runtime_destroy(runtime));
    CHECK(unsetenv("AQUIFER_TRACE") == 0);
    CHECK(remove(snapshot) == 0 && remove(trace) == 0);
}

/* A device whose memory cannot be mapped in parts. */
static void plain_devices(void) {
    aq_runtime_options options = simulated(1);
    options.sim_flags = AQ_SIM_PLAIN;
    aq_runtime runtime = create(&options);
    aq_device_facts facts;
    memset(&facts, 0, sizeof facts);
    facts.size = sizeof facts;
    OK(aq_device(runtime, 0, &facts));
    CHECK(!facts.virtual_memory && facts.granularity == 0);
    uint64_t one = alloc(runtime, 0, 3u << 20, NULL), two = alloc(runtime, 0, 500, NULL);
    OK(aq_free(runtime, 0, one));
    OK(aq_free(runtime, 0, two));
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
}

/* Returns what is held after blocks that leave 64 MiB free between others. */
static uint64_t held_by(uint64_t slack) {
    aq_runtime_options options = simulated(1);
    options.slack = slack;
    aq_runtime runtime = create(&options);
    uint64_t first = alloc(runtime, 0, 64u << 20, NULL), rest = alloc(runtime, 0, 32u << 20, NULL);
    OK(aq_free(runtime, 0, first));
    uint64_t larger = alloc(runtime, 0, 66u << 20, NULL);
    aq_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    OK(aq_device_stats(runtime, 0, &stats));
    OK(aq_free(runtime, 0, larger));
    OK(aq_free(runtime, 0, rest));
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));
    return stats.physical;
}

static void a_pool_holds_its_slack_beyond_its_peak(void) {
    CHECK(held_by(6) * 100 <= (uint64_t)106 * 98 << 20);
    CHECK(held_by(0) * 100 > (uint64_t)106 * 98 << 20);
    CHECK(held_by(0) == held_by(17));
    aq_runtime runtime = 77;
    aq_runtime_options options = simulated(1);
    options.slack = 10000;
    OK(aq_runtime_create(&options, &runtime));
    OK(aq_runtime_destroy(runtime));
    runtime = 77;
    options.slack = 10001;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    CHECK(strstr(aq_last_error(), "options->slack is 10001") != NULL && runtime == 77);
    options.slack = (uint64_t)1 << 32 | 17;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
}

static void panics(aq_runtime runtime) {
    for (int n = 0; n < 3; n++) {
        ANSWERS(AQ_ERROR_PANIC, aq_sim_panic(runtime));
        CHECK(strstr(aq_last_error(), "planted by aq_sim_panic") != NULL);
        OK(aq_free(runtime, 0, alloc(runtime, 0, 512, NULL)));
    }
}

static void runtimes_that_are_over(void) {
    aq_runtime_options options = simulated(1);
    aq_runtime runtime = create(&options), other = create(&options);
    void *stream = stream_of(runtime, 0), *memory = NULL;
    uint64_t blocks[3], address = 77;
    uint32_t count;
    for (int n = 0; n < 3; n++) blocks[n] = alloc(runtime, 0, 4096u << n, stream);
    OK(aq_pinned_alloc(runtime, 0, 100, 0, &memory));
    OK(aq_runtime_destroy(runtime));

    ANSWERS(AQ_ERROR_CLOSED, aq_runtime_destroy(runtime));
    ANSWERS(AQ_ERROR_CLOSED, aq_alloc(runtime, 0, 512, stream, &address));
    ANSWERS(AQ_ERROR_CLOSED, aq_device_count(runtime, &count));
    ANSWERS(AQ_ERROR_CLOSED, aq_free_on(runtime, 0, blocks[0], stream));
    CHECK(strstr(aq_last_error(), "has been destroyed") != NULL);
    memset(memory, 7, 100);
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_pinned_free((char *)memory + 8));
    CHECK(strstr(aq_last_error(), "lies 8 bytes inside the block of 100 bytes at 0x") != NULL);
    OK(aq_pinned_free(memory));
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_pinned_free(memory));
    CHECK(strstr(aq_last_error(), "inside") == NULL);

    /* Blocks that were out are freed one by one, each once, with another runtime in between. */
    OK(aq_free(runtime, 0, blocks[0]));
    ANSWERS(AQ_ERROR_DOUBLE_FREE, aq_free(runtime, 0, blocks[0]));
    ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_free(other, 0, blocks[1]));
    OK(aq_free(other, 0, alloc(other, 0, 512, NULL)));
    OK(aq_free(runtime, 0, blocks[2]));
    OK(aq_free(runtime, 0, blocks[1]));
    ANSWERS(AQ_ERROR_CLOSED, aq_free(runtime, 0, blocks[1]));

    ANSWERS(AQ_ERROR_BAD_RUNTIME, aq_free(0, 0, 512));
    ANSWERS(AQ_ERROR_BAD_RUNTIME, aq_runtime_destroy(other + 1000));
    OK(aq_runtime_destroy(other));
}

int main(void) {
    versions();
    options_of_other_versions();
    without_a_gpu();
    aq_runtime_options options = simulated(2);
    aq_runtime runtime = create(&options);
    devices(runtime);
    blocks(runtime);
    limits(runtime);
    snapshots(runtime);
    panics(runtime);
    in_order(runtime, 2);
    OK(aq_runtime_destroy(runtime));
    memory_snapshots();
    history_and_trace_receive_the_same_events();
    plain_devices();
    a_pool_holds_its_slack_beyond_its_peak();
    runtimes_that_are_over();
    puts("basics: as the header says");
    return 0;
}
