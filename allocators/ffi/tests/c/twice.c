/* Two libraries with the same names in one process, loaded apart: neither sees the other's runtimes, errors or blocks. Takes
 * their paths. */
#include "check.h"
#include <dlfcn.h>

typedef struct library {
    void *handle;
    aq_status (*create)(const aq_runtime_options *, aq_runtime *);
    aq_status (*destroy)(aq_runtime);
    aq_status (*alloc)(aq_runtime, uint32_t, uint64_t, void *, uint64_t *);
    aq_status (*free)(aq_runtime, uint32_t, uint64_t);
    const char *(*error)(void);
    aq_runtime runtime;
} library;

static void find(library *lib, const char *name, void *function) {
    void *found = dlsym(lib->handle, name);
    CHECK(found != NULL);
    memcpy(function, &found, sizeof found);
}

static library load(const char *path) {
    library lib;
    memset(&lib, 0, sizeof lib);
    lib.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(lib.handle != NULL);
    find(&lib, "aq_runtime_create", &lib.create);
    find(&lib, "aq_runtime_destroy", &lib.destroy);
    find(&lib, "aq_alloc", &lib.alloc);
    find(&lib, "aq_free", &lib.free);
    find(&lib, "aq_last_error", &lib.error);
    aq_runtime_options options = simulated(1);
    OK(lib.create(&options, &lib.runtime));
    return lib;
}

int main(int count, char **paths) {
    CHECK(count == 3);
    library one = load(paths[1]), two = load(paths[2]);
    CHECK(one.alloc != two.alloc);
    uint64_t a = 0, b = 0;
    OK(one.alloc(one.runtime, 0, 1u << 20, NULL, &a));
    OK(two.alloc(two.runtime, 0, 1u << 20, NULL, &b));
    /* Each counts its runtimes from 1. */
    CHECK(one.runtime == two.runtime);
    if (a != b) ANSWERS(AQ_ERROR_FOREIGN_BLOCK, two.free(two.runtime, 0, a));
    CHECK(one.error()[0] == 0);
    OK(one.free(one.runtime, 0, a));
    OK(one.destroy(one.runtime));
    OK(two.free(two.runtime, 0, b));
    ANSWERS(AQ_ERROR_CLOSED, one.free(one.runtime, 0, a));
    CHECK(two.error()[0] == 0 || strstr(two.error(), "does not belong to this pool") != NULL);
    OK(two.destroy(two.runtime));
    CHECK(!dlclose(one.handle) && !dlclose(two.handle));
    puts("twice: apart");
    return 0;
}
