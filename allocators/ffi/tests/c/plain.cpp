// The header as C++17, and the small program that its first lines promise.
#include "aquifer.h"
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

static_assert(std::is_same_v<aq_status, std::int32_t>);
static_assert(std::is_standard_layout_v<aq_runtime_options> && std::is_trivial_v<aq_stats>);

int main() {
    aq_runtime_options options{};
    options.size = sizeof options;
    options.driver = AQ_DRIVER_MACHINE_OR_SIM;
    aq_runtime rt{};
    if (aq_runtime_create(&options, &rt) != AQ_OK) {
        std::fprintf(stderr, "%s\n", aq_last_error());
        return 1;
    }
    std::vector<float> up(100'000, 1.5f), down(up.size());
    std::uint64_t x{};
    const auto bytes = up.size() * sizeof(float);
    aq_status status = aq_alloc(rt, 0, bytes, nullptr, &x);
    if (status == AQ_OK) status = aq_upload(rt, 0, x, 0, up.data(), bytes, nullptr);
    if (status == AQ_OK) status = aq_download(rt, 0, x, 0, down.data(), bytes, nullptr);
    if (status == AQ_OK) status = aq_free(rt, 0, x);
    aq_stats stats{};
    stats.size = sizeof stats;
    if (status == AQ_OK) status = aq_device_stats(rt, 0, &stats);
    if (status == AQ_OK) status = aq_runtime_destroy(rt);
    if (status != AQ_OK || down != up || stats.blocks != 0) {
        const std::string text(aq_last_error());
        std::fprintf(stderr, "%s: %s\n", aq_status_name(status), text.c_str());
        return 1;
    }
    std::puts("plain: the same from C++");
    return 0;
}
