// What the guide shows on its page about C and Python: the same memory from C++, on the GPU, or on
// a simulated one.
#include <aquifer.hpp>
#include <cstdio>
#include <vector>

int main() try {
    aq_runtime_options options = aquifer::default_options();
    options.driver = AQ_DRIVER_MACHINE_OR_SIM;  // without a GPU on a simulated one
    aquifer::runtime rt(options);

    void *stream = nullptr;  // the default stream, or your own cudaStream_t
    aquifer::pinned_allocator<float> near_device(rt, 0);
    std::vector<float, aquifer::pinned_allocator<float>> values(1 << 20, 1.5f, near_device);
    aquifer::device_buffer<float> x(rt, 0, values.size(), stream);
    x.upload(values, stream);

    std::vector<float> back(values.size());
    aquifer::transfer copy =
        x.block().download_begin(back.data(), back.size() * sizeof(float), stream);
    copy.wait();  // the other work of this thread was done meanwhile
    x.reset();    // no wait: later work on the stream may reuse it
    return back[12] != 1.5f;
} catch (const aquifer::error &error) {
    std::fprintf(stderr, "%s: %s\n", aq_status_name(error.status()), error.what());
    return 1;
}
