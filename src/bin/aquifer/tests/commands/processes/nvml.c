/* A library in the place of NVML: two GPUs, one of which does not tell how much is in use. */
#include <stdio.h>
#include <string.h>

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci_info;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_info;

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
    memset(info, 0, sizeof *info);
    info->bus = (unsigned)(size_t)device;
    snprintf(info->legacy, sizeof info->legacy, "0000:%02X:00.0", info->bus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, "GPU %u", (unsigned)(size_t)device);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_info *info) {
    if ((size_t)device == 2) return NOT_SUPPORTED;
    info->total = 16ull << 30;
    info->reserved = 1ull << 20;
    info->used = 5ull << 30;
    info->free = info->total - info->used - info->reserved;
    return SUCCESS;
}
