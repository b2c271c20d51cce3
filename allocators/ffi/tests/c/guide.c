/* What the guide shows on its page about C and Python: memory there and back, on the GPU, or on a simulated one. */
#include <aquifer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(aq_status status) {
    if (status) fprintf(stderr, "%s: %s\n", aq_status_name(status), aq_last_error()), exit(1);
}

static char host[1 << 20], back[1 << 20];

int main(void) {
    aq_runtime_options options = {0};
    options.size = sizeof options;
    options.driver = AQ_DRIVER_MACHINE_OR_SIM; /* without a GPU on a simulated one */
    options.history = 1000;                    /* the last so many events, for the memory viewer */
    aq_runtime rt;
    check(aq_runtime_create(&options, &rt));

    void *stream = NULL; /* the default stream, or your own cudaStream_t */
    uint64_t x;
    check(aq_alloc(rt, 0, sizeof host, stream, &x));
    memset(host, 7, sizeof host);
    check(aq_upload(rt, 0, x, 0, host, sizeof host, stream));
    check(aq_download(rt, 0, x, 0, back, sizeof back, stream));
    check(aq_memory_snapshot(rt, 0, "memory.pickle")); /* for https://pytorch.org/memory_viz */
    check(aq_free(rt, 0, x)); /* no wait: later work on the stream may reuse it */
    check(aq_runtime_destroy(rt));
    remove("memory.pickle");
    return memcmp(host, back, sizeof host) != 0;
}
