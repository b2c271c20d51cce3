/* A device that is lost: codes, and other devices go on. The library keeps what it knows of memory that the driver would not
 * take back, so this one is not looked at for leaks. */
#include "check.h"

int main(void) {
    aq_runtime_options options = simulated(2);
    aq_runtime runtime = create(&options);
    void *stream = stream_of(runtime, 0);
    unsigned char bytes[100] = {0};
    uint64_t block = alloc(runtime, 0, 1u << 20, stream), address = 77;
    OK(aq_sim_lose(runtime, 0));
    ANSWERS(AQ_ERROR_DEVICE_LOST, aq_alloc(runtime, 0, 64u << 20, stream, &address));
    ANSWERS(AQ_ERROR_DEVICE_LOST, aq_upload(runtime, 0, block, 0, bytes, sizeof bytes, stream));
    CHECK(address == 77);
    OK(aq_free(runtime, 0, block));
    OK(aq_free(runtime, 1, alloc(runtime, 1, 512, NULL)));
    in_order(runtime, 2);
    OK(aq_runtime_destroy(runtime));
    puts("lost: told so, and nothing else");
    return 0;
}
