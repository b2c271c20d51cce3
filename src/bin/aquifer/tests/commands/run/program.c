// Programs that use the driver. The first argument says what to do; with OPENED defined, the driver is opened by the name in
// the variable DRIVER, and its functions are asked for by cuGetProcAddress.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t Address;
#define FUNCTIONS(F) \
    F(cuInit, (unsigned)) F(cuDevicePrimaryCtxRetain, (void **, int)) F(cuCtxSetCurrent, (void *)) \
    F(cuMemGetInfo_v2, (size_t *, size_t *)) F(cuDeviceTotalMem_v2, (size_t *, int)) \
    F(cuMemAlloc_v2, (Address *, size_t)) F(cuMemFree_v2, (Address)) F(cuMemAllocAsync, (Address *, size_t, void *)) \
    F(cuMemFreeAsync, (Address, void *)) F(cuStreamSynchronize, (void *)) F(cuMemHostAlloc, (void **, size_t, unsigned)) \
    F(cuMemFreeHost, (void *)) F(cuMemCreate, (uint64_t *, size_t, const void *, unsigned long long)) \
    F(cuMemRelease, (uint64_t)) F(cuMemMap, (Address, size_t, size_t, uint64_t, unsigned long long)) \
    F(cuMemUnmap, (Address, size_t)) F(cuMemRetainAllocationHandle, (uint64_t *, void *)) F(cuAddedLater, (int *)) \
    F(cuStreamBeginCapture_v2, (void *, unsigned)) F(cuDevicePrimaryCtxReset_v2, (int))
#ifdef OPENED
#define DECLARE(name, types) static unsigned(*name) types;
#else
#define DECLARE(name, types) unsigned name types;
#endif
FUNCTIONS(DECLARE)

static void start(void) {
#ifdef OPENED
    void *driver = dlopen(getenv("DRIVER"), RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); exit(9); }
    unsigned (*find)(const char *, void **, int, unsigned long long, unsigned *) = dlsym(driver, "cuGetProcAddress_v2");
#define FIND(name, types) { char plain[64]; snprintf(plain, sizeof plain, "%s", #name); char *v = strstr(plain, "_v2"); if (v) *v = 0; \
    if (find(plain, (void **)&name, 13000, 0, 0) && find(#name, (void **)&name, 13000, 0, 0)) exit(8); }
    FUNCTIONS(FIND)
#endif
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) exit(7);
}

static size_t mib(size_t n) { return n << 20; }
static void line(const char *what, unsigned code) { printf("%s: %u\n", what, code); fflush(stdout); }

static void *pairs(void *count) {
    void *context;
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    for (size_t i = 0; i < (size_t)count; i++) {
        Address a;
        if (cuMemAlloc_v2(&a, 1 + i % 5000) || cuMemFree_v2(a)) exit(6);
    }
    return 0;
}

int main(int n, char **argument) {
    const char *what = n > 1 ? argument[1] : "all";
    Address a, b;
    size_t free, total;
    uint64_t handle, again;
    void *host;
    const struct { unsigned kind, types, location; int number; } on_device = {1, 0, 1, 0}, on_host = {1, 0, 3, 0};
    start();
    if (!strcmp(what, "all")) {
        int later;
        line("alloc", cuMemAlloc_v2(&a, mib(5)));
        line("small", cuMemAlloc_v2(&b, 1000));
        line("free", cuMemFree_v2(a));
        line("async", cuMemAllocAsync(&a, mib(40), (void *)0x20));
        line("free async", cuMemFreeAsync(a, (void *)0x20));
        line("pinned", cuMemHostAlloc(&host, mib(3), 0));
        line("create", cuMemCreate(&handle, mib(4), &on_device, 0));
        line("create on the host", cuMemCreate(&again, mib(6), &on_host, 0));
        line("release", cuMemRelease(again));
        line("map", cuMemMap(0x100000000, mib(4), 0, handle, 0));
        line("retain", cuMemRetainAllocationHandle(&again, (void *)0x100000000));
        line("release", cuMemRelease(handle) | cuMemRelease(again));
        line("unmap", cuMemUnmap(0x100000000, mib(4)));
        line("added later", cuAddedLater(&later) | (later != 7));
        line("wrong free", cuMemFree_v2(0x123456));
        line("no room for the address", cuMemAlloc_v2(0, 100));
        line("no bytes", cuMemAlloc_v2(&a, 0));
        line("more than there is", cuMemAlloc_v2(&a, (size_t)-1));
        line("captures", cuStreamBeginCapture_v2((void *)0x20, 0));
        line("captured", cuMemAllocAsync(&a, mib(1), (void *)0x20));
        return 5;
    }
    if (!strcmp(what, "limits")) {
        size_t last = 0;
        cuMemGetInfo_v2(&free, &total);
        printf("free %zu total %zu\n", free >> 20, total >> 20);
        cuMemGetInfo_v2(0, &total);
        cuMemGetInfo_v2(&free, 0);
        cuDeviceTotalMem_v2(&total, 0);
        printf("total %zu\n", total >> 20);
        while (!cuMemAlloc_v2(&a, mib(10))) last += 10;
        printf("got %zu\n", last);
        while (!cuMemAlloc_v2(&a, 1000)) last++;
        cuMemGetInfo_v2(&free, &total);
        printf("then free %zu\n", free >> 20);
        line("pinned", cuMemHostAlloc(&host, mib(8), 0));
        line("more pinned", cuMemHostAlloc(&host, mib(8), 0));
        return 0;
    }
    if (!strcmp(what, "pool")) {
        line("alloc", cuMemAllocAsync(&a, mib(300), 0));
        line("free", cuMemFreeAsync(a, 0));
        // What the pool keeps is released for it.
        line("other", cuMemAlloc_v2(&b, mib(300)));
        line("too much", cuMemAllocAsync(&a, mib(300), 0));
        return 0;
    }
    if (!strcmp(what, "threads")) {
        pthread_t threads[16];
        for (int i = 0; i < 16; i++) pthread_create(&threads[i], 0, pairs, (void *)2000);
        for (int i = 0; i < 16; i++) pthread_join(threads[i], 0);
        return 0;
    }
    if (!strcmp(what, "fork")) {
        line("alloc", cuMemAlloc_v2(&a, mib(2)));
        int status, child = fork();
        if (!child) _exit(cuMemAlloc_v2(&b, mib(2)) ? 1 : 3);
        waitpid(child, &status, 0);
        line("child", WEXITSTATUS(status));
        child = fork();
        if (!child) execl(argument[0], argument[0], "one", (char *)0);
        waitpid(child, &status, 0);
        line("executed", WEXITSTATUS(status));
        return 0;
    }
    if (!strcmp(what, "one")) {
        cuMemAlloc_v2(&a, mib(7));
        return 4;
    }
    if (!strcmp(what, "reset")) {
        line("alloc", cuMemAlloc_v2(&a, mib(400)));
        line("reset", cuDevicePrimaryCtxReset_v2(0));
        line("alloc", cuMemAlloc_v2(&a, mib(400)));
        return 0;
    }
    cuMemAlloc_v2(&a, mib(7));
    if (!strcmp(what, "crash")) { usleep(100000); raise(SIGSEGV); }
    if (!strcmp(what, "abort")) { usleep(100000); abort(); }
    if (!strcmp(what, "wait")) { puts("waits"); fflush(stdout); pause(); }
    return 3;
}
