/* What the test programs share: a check that prints its condition, and a simulated runtime. */
#ifndef CHECK_H
#define CHECK_H

#include "aquifer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: not so: %s; last error: %s\n", __FILE__, __LINE__, #what, \
                    aq_last_error());                                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* That a call answers with a status. */
#define ANSWERS(status, call)                                                                      \
    do {                                                                                           \
        aq_status answer_ = (call);                                                                \
        if (answer_ != (status)) {                                                                 \
            fprintf(stderr, "%s:%d: %s answers with %s: %s\n", __FILE__, __LINE__, #call, \
                    aq_status_name(answer_),                                                       \
                    aq_last_error());                                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define OK(call) ANSWERS(AQ_OK, call)

static inline aq_runtime_options simulated(uint32_t devices) {
    aq_runtime_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.driver = AQ_DRIVER_SIM;
    options.sim_devices = devices;
    options.device_limit = 256u << 20;
    options.pinned_limit = 256u << 20;
    return options;
}

static inline aq_runtime create(const aq_runtime_options *options) {
    aq_runtime runtime = 0;
    OK(aq_runtime_create(options, &runtime));
    CHECK(runtime != 0);
    return runtime;
}

static inline void *stream_of(aq_runtime runtime, uint32_t device) {
    void *stream = NULL;
    OK(aq_sim_stream_create(runtime, device, &stream));
    return stream;
}

static inline uint64_t alloc(aq_runtime runtime, uint32_t device, uint64_t bytes, void *stream) {
    uint64_t address = 0;
    OK(aq_alloc(runtime, device, bytes, stream, &address));
    CHECK(address != 0 && address % 512 == 0);
    return address;
}

static inline aq_stats stats_of(aq_runtime runtime, uint32_t device) {
    aq_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    OK(aq_device_stats(runtime, device, &stats));
    CHECK(stats.size == sizeof stats);
    return stats;
}

/* That nothing was out of order, and nothing is out. */
static inline void in_order(aq_runtime runtime, uint32_t devices) {
    uint64_t count = 1;
    char *report = NULL;
    OK(aq_sim_violations(runtime, &count, &report));
    if (count != 0) {
        fprintf(stderr, "%s\n", report);
        exit(1);
    }
    aq_text_free(report);
    for (uint32_t device = 0; device < devices; device++) {
        aq_stats stats = stats_of(runtime, device);
        CHECK(stats.blocks == 0 && stats.live == 0 && stats.requested == 0);
        CHECK(stats.allocations == stats.frees);
    }
}

#endif
