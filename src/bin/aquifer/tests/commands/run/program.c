// Programs that use the driver. The first argument says what to do; with OPENED defined, the driver is opened by the name in
// the variable DRIVER, and its functions are asked for by cuGetProcAddress, or with the variable DLSYM by dlsym.
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
    F(cuStreamBeginCapture_v2, (void *, unsigned)) F(cuDevicePrimaryCtxReset_v2, (int)) F(cuMemAllocManaged, (Address *, size_t, unsigned)) \
    F(cuMemAllocPitch_v2, (Address *, size_t *, size_t, size_t, unsigned)) F(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    F(cuMemHostUnregister, (void *)) F(cuArrayCreate_v2, (Address *, const void *)) F(cuArrayDestroy, (Address))
#ifdef OPENED
#define DECLARE(name, types) static unsigned(*name) types;
#else
#define DECLARE(name, types) unsigned name types;
#endif
FUNCTIONS(DECLARE)

// Makes a device's context the current one.
static void use(int device) {
    void *context;
    if (cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) exit(7);
}

static void start(void) {
#ifdef OPENED
    void *driver = dlopen(getenv("DRIVER"), RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); exit(9); }
    unsigned (*find)(const char *, void **, int, unsigned long long, unsigned *) = dlsym(driver, "cuGetProcAddress_v2");
#define FIND(name, types) { char plain[64]; snprintf(plain, sizeof plain, "%s", #name); char *v = strstr(plain, "_v2"); if (v) *v = 0; \
    if (getenv("DLSYM")) name = dlsym(driver, #name); \
    else if (find(plain, (void **)&name, 13000, 0, 0) && find(#name, (void **)&name, 13000, 0, 0)) exit(8); \
    if (!name) exit(8); }
    FUNCTIONS(FIND)
#endif
    if (cuInit(0)) exit(7);
    use(0);
}

static size_t mib(size_t n) { return n << 20; }
static void line(const char *what, unsigned code) { printf("%s: %u\n", what, code); fflush(stdout); }

static void peak(int device) {
    size_t (*most)(int) = (size_t (*)(int))dlsym(RTLD_DEFAULT, "stand_in_peak");
    if (most) printf("peak %zu\n", most(device) >> 20);
}
// Allocates blocks of 10 MiB until one is refused.
static size_t all_there_is(void) {
    Address a;
    size_t got = 0;
    while (!cuMemAlloc_v2(&a, mib(10))) got += 10;
    return got;
}
// Waits until the trace, if there is one, has the first block.
static void written(void) {
    const char *path = getenv("AQUIFER_RUN_RECORD");
    char text[4096];
    for (int found = !path; !found; usleep(1000)) {
        FILE *file = fopen(path, "r");
        while (file && fgets(text, sizeof text, file)) found |= strstr(text, "cuMemAlloc") != 0;
        if (file) fclose(file);
    }
}

// Holds what it gets: blocks of their own and of the pool.
static void *crowd(void *number) {
    Address held[8] = {0};
    use(0);
    for (size_t i = (size_t)number; i < 400; i++) {
        Address *a = &held[i % 8];
        if (*a) cuMemFree_v2(*a);
        if (i % 16 < 12 ? cuMemAlloc_v2(a, mib(2 + i % 9)) : cuMemAllocAsync(a, mib(1 + i % 40), 0)) *a = 0;
    }
    return 0;
}
static void *pairs(void *count) {
    use(0);
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
    const struct { size_t width, height; unsigned format, channels; } floats = {1024, 1024, 0x20, 1};
    int number = n > 2 ? atoi(argument[2]) : 0;
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
        line("map", cuMemMap(0x200000000, mib(6), 0, again, 0));
        line("release", cuMemRelease(again));
        line("free what is not mapped", cuMemFree_v2(b));
        line("unmap", cuMemUnmap(0x200000000, mib(6)));
        line("map and retain", cuMemMap(0x100000000, mib(4), 0, handle, 0) | cuMemRetainAllocationHandle(&again, (void *)0x100000000));
        line("release and unmap", cuMemRelease(handle) | cuMemUnmap(0x100000000, mib(4)));
        line("small", cuMemAlloc_v2(&b, 1000));
        line("release", cuMemRelease(again));
        line("added later", cuAddedLater(&later) | (later != 7));
        line("wrong free", cuMemFree_v2(0x123456));
        line("no room for the address", cuMemAlloc_v2(0, 100));
        line("no bytes", cuMemAlloc_v2(&a, 0));
        line("more than there is", cuMemAlloc_v2(&a, (size_t)-1));
        line("pitch", cuMemAllocPitch_v2(&a, &total, 1000, 3000, 4));
        line("managed", cuMemAllocManaged(&a, mib(8), 1));
        line("free", cuMemFree_v2(a));
        line("array", cuArrayCreate_v2(&a, &floats));
        line("destroy", cuArrayDestroy(a));
        line("register", cuMemHostRegister_v2(argument, 4096, 0));
        line("unregister", cuMemHostUnregister(argument));
        use(1);
        line("other device", cuMemAlloc_v2(&a, mib(3)));
        line("captures", cuStreamBeginCapture_v2((void *)0x20, 0));
        line("captured", cuMemAllocAsync(&a, mib(1), (void *)0x20));
        return 5;
    }
    if (!strcmp(what, "limits")) {
        size_t small = 0;
        use(number);
        cuMemGetInfo_v2(&free, &total);
        printf("free %zu total %zu\n", free >> 20, total >> 20);
        cuMemGetInfo_v2(0, &total);
        cuMemGetInfo_v2(&free, 0);
        cuDeviceTotalMem_v2(&total, number);
        printf("total %zu\n", total >> 20);
        printf("got %zu\n", all_there_is());
        peak(number);
        while (!cuMemAlloc_v2(&a, 1000)) small++;
        printf("small %zu\n", small);
        cuMemGetInfo_v2(&free, &total);
        printf("then free %zu\n", free >> 20);
        line("one more", cuMemAlloc_v2(&a, mib(10)));
        line("pinned", cuMemHostAlloc(&host, mib(8), 0));
        line("more pinned", cuMemHostAlloc(&host, mib(8), 0));
        return 0;
    }
    if (!strcmp(what, "pool")) {
        line("alloc", cuMemAllocAsync(&a, mib(300), 0));
        cuMemGetInfo_v2(&free, &total);
        printf("then free %zu\n", free >> 20);
        line("free", cuMemFreeAsync(a, 0));
        // What the pool keeps is released for it.
        line("other", cuMemAlloc_v2(&b, mib(400)));
        line("too much", cuMemAllocAsync(&a, mib(300), 0));
        line("free", cuMemFree_v2(b));
        line("again", cuMemAllocAsync(&a, mib(380), 0));
        line("free", cuMemFreeAsync(a, 0));
        line("small", cuMemAlloc_v2(&b, 1000));
        peak(0);
        return 0;
    }
    if (!strcmp(what, "threads")) {
        pthread_t threads[16];
        for (int i = 0; i < 16; i++) pthread_create(&threads[i], 0, pairs, (void *)2000);
        for (int i = 0; i < 16; i++) pthread_join(threads[i], 0);
        return 0;
    }
    if (!strcmp(what, "crowd")) {
        pthread_t threads[16];
        for (size_t i = 0; i < 16; i++) pthread_create(&threads[i], 0, crowd, (void *)i);
        for (int i = 0; i < 16; i++) pthread_join(threads[i], 0);
        peak(0);
        return 0;
    }
    if (!strcmp(what, "exec")) {
        cuMemAlloc_v2(&a, mib(2));
        written();
        execl(argument[0], argument[0], number ? "exec" : "one", (char *)0);
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
        line("process", child);
        return 0;
    }
    if (!strcmp(what, "signals")) {
        // No thread but this one may take it: it would end the process.
        sigset_t all;
        sigfillset(&all);
        line("alloc", cuMemAlloc_v2(&a, mib(2)));
        pthread_sigmask(SIG_SETMASK, &all, 0);
        for (int i = 0; i < 50; i++) if (kill(getpid(), SIGUSR1) || sigwait(&all, &number) || number != SIGUSR1) return 1;
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
    if (!strcmp(what, "ask")) {
        // Once for each line that it is sent.
        while (getchar() == '\n') {
            printf("got %zu\n", all_there_is());
            fflush(stdout);
        }
        return 0;
    }
    line("alloc", cuMemAlloc_v2(&a, mib(number ? number : 7)));
    written();
    if (!strcmp(what, "crash")) raise(SIGSEGV);
    if (!strcmp(what, "abort")) abort();
    if (!strcmp(what, "wait")) { puts("waits"); fflush(stdout); pause(); }
    return 3;
}
