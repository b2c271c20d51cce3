/* Processes that share a memory by a ledger: claims, refusals, waits, and what is left of a process that is killed. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)
#define SECOND ((uint64_t)1000000000)

static char folder[64];

static aq_ledger_options terms(const char *name, uint64_t capacity) {
    aq_ledger_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.folder = folder;
    options.name = name;
    options.capacity = capacity;
    return options;
}

static aq_member join(const char *name, uint64_t guarantee, uint64_t limit) {
    aq_ledger_options options = terms(name, 100);
    options.guarantee = guarantee;
    options.limit = limit;
    aq_member member = 0;
    OK(aq_ledger_join(&options, &member));
    CHECK(member != 0);
    return member;
}

static uint64_t claimed(aq_member member) {
    uint64_t bytes = 0;
    OK(aq_ledger_member(member, &bytes, NULL, NULL, NULL));
    return bytes;
}

/* That the figures of a ledger have a text. */
static int shows(const char *name, const char *text) {
    char *json = NULL;
    OK(aq_ledger_figures(folder, name, &json));
    int found = strstr(json, text) != NULL;
    if (!found) fprintf(stderr, "%s\n", json);
    aq_text_free(json);
    return found;
}

static void refusals(void) {
    aq_member member = 7;
    aq_ledger_options options = terms("refused", 100);
    ANSWERS(AQ_ERROR_NULL, aq_ledger_join(NULL, &member));
    ANSWERS(AQ_ERROR_NULL, aq_ledger_join(&options, NULL));
    options.size = 3;
    ANSWERS(AQ_ERROR_VERSION, aq_ledger_join(&options, &member));
    options = terms(NULL, 100);
    ANSWERS(AQ_ERROR_NULL, aq_ledger_join(&options, &member));
    options = terms("a/b", 100);
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_ledger_join(&options, &member));
    options = terms("absent", 0);
    ANSWERS(AQ_ERROR_SYSTEM, aq_ledger_join(&options, &member));
    options = terms("refused", 100);
    options.guarantee = 60;
    options.limit = 50;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_ledger_join(&options, &member));
    options.limit = 0;
    aq_member other = join("refused", 50, 0);
    ANSWERS(AQ_ERROR_OUT_OF_BUDGET, aq_ledger_join(&options, &member));
    CHECK(strstr(aq_last_error(), "guaranteed to other processes") != NULL);
    OK(aq_ledger_leave(other));
    CHECK(member == 7);
    options = terms("refused", 100);
    options.folder = "/dev/null";
    ANSWERS(AQ_ERROR_SYSTEM, aq_ledger_join(&options, &member));
    options.folder = NULL;
    CHECK(setenv("AQUIFER_LEDGER", "off", 1) == 0);
    ANSWERS(AQ_ERROR_BAD_SETTING, aq_ledger_join(&options, &member));
    CHECK(setenv("AQUIFER_LEDGER", folder, 1) == 0);
    OK(aq_ledger_join(&options, &member));
    OK(aq_ledger_leave(member));

    char *json = NULL;
    ANSWERS(AQ_ERROR_SYSTEM, aq_ledger_figures(folder, "absent", &json));
    ANSWERS(AQ_ERROR_NULL, aq_ledger_figures(folder, "refused", NULL));
    ANSWERS(AQ_ERROR_NULL, aq_ledger_figures(folder, NULL, &json));
    ANSWERS(AQ_ERROR_NULL, aq_ledger_names(folder, NULL));
    CHECK(json == NULL);
    ANSWERS(AQ_ERROR_CLOSED, aq_ledger_leave(member));
    ANSWERS(AQ_ERROR_CLOSED, aq_ledger_claim(member, 1, 0));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_ledger_claim(0, 1, 0));
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_ledger_claim(member + 1000, 1, 0));
}

static void claims(void) {
    aq_member one = join("claims", 60, 0), two = join("claims", 0, 90);
    OK(aq_ledger_claim(two, 90, 0));
    ANSWERS(AQ_ERROR_OUT_OF_BUDGET, aq_ledger_claim(two, 1, 60 * SECOND));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_ledger_claim(one, 60, 0));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_ledger_claim(one, 60, 1000000));
    CHECK(strstr(aq_last_error(), "other processes hold 90 B") != NULL);
    uint64_t bytes = 1, limit = 0, room = 0, owed = 1;
    OK(aq_ledger_member(one, &bytes, &limit, &room, &owed));
    CHECK(bytes == 0 && limit == 100 && room == 10 && owed == 0);
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_ledger_release(two, 91));
    CHECK(claimed(two) == 90);
    OK(aq_ledger_release(two, 50));
    OK(aq_ledger_claim(one, 60, 0));
    CHECK(shows("claims", "\"capacity\":100") && shows("claims", "\"claimed\":60"));
    CHECK(shows("claims", "\"free\":0") && shows("claims", "\"guarantee\":60"));
    OK(aq_ledger_release(one, 30));
    /* What no member has claimed of the bytes in use. */
    OK(aq_ledger_measure(one, 90));
    OK(aq_ledger_member(one, NULL, NULL, &room, NULL));
    CHECK(room == 10 && shows("claims", "\"unaccounted\":20"));
    OK(aq_ledger_measure(one, 0));
    OK(aq_ledger_leave(one));
    CHECK(!strstr(aq_last_error(), "ended"));
    OK(aq_ledger_claim(two, 50, 0));
    OK(aq_ledger_leave(two));
    CHECK(shows("claims", "\"members\":[]"));
}

/* A thread that gives back as soon as it owes. */
static void *gives_back(void *data) {
    aq_member member = *(aq_member *)data;
    uint64_t owed = 0;
    for (int n = 0; n < 20000 && owed == 0; n++) {
        OK(aq_ledger_member(member, NULL, NULL, NULL, &owed));
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    CHECK(owed == 40);
    OK(aq_ledger_release(member, owed));
    return NULL;
}

static void waits(void) {
    aq_member holder = join("waits", 60, 0), other = join("waits", 0, 0);
    OK(aq_ledger_claim(holder, 100, 0));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, gives_back, &holder));
    OK(aq_ledger_claim(other, 40, 60 * SECOND));
    CHECK(!pthread_join(thread, NULL));
    CHECK(claimed(holder) == 60 && claimed(other) == 40);
    OK(aq_ledger_leave(holder));
    OK(aq_ledger_leave(other));
}

/* A child joins by itself, claims, and never gives back. */
static void deaths(void) {
    int ready[2];
    CHECK(!pipe(ready));
    pid_t child = fork();
    if (child == 0) {
        aq_member member = join("deaths", 0, 0);
        OK(aq_ledger_claim(member, 80, 0));
        CHECK(write(ready[1], "y", 1) == 1);
        for (;;) pause();
    }
    char said = 0;
    CHECK(child > 0 && read(ready[0], &said, 1) == 1 && said == 'y');
    aq_member member = join("deaths", 0, 0);
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_ledger_claim(member, 21, 0));
    CHECK(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
    OK(aq_ledger_claim(member, 100, 0));

    /* A child has no part in the claims of its parent. */
    child = fork();
    if (child == 0) {
        aq_status answer = aq_ledger_claim(member, 1, 0);
        _exit(answer == AQ_ERROR_CLOSED && !strcmp(aq_last_error(),
            "a forked child has no share of its parent's ledger") ? 0 : 1);
    }
    int ended = -1;
    CHECK(child > 0 && waitpid(child, &ended, 0) == child && WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    CHECK(claimed(member) == 100);
    OK(aq_ledger_leave(member));
    close(ready[0]);
    close(ready[1]);
}

/* Two runtimes share a simulated device, as two processes would, beside a member that only claims. */
static void runtimes(void) {
    aq_runtime_options options = simulated(1);
    options.device_limit = 0;
    options.sim_memory = 96 * MIB;
    options.shared = AQ_SHARED_DEVICES;
    options.shared_guarantee = 40 * MIB;
    options.ledger_folder = folder;
    aq_runtime runtime = create(&options);
    char *name = NULL;
    uint64_t capacity = 0;
    OK(aq_ledger_of_device(runtime, 0, &name, &capacity));
    CHECK(!strcmp(name, "simulated-0") && capacity == 96 * MIB);
    ANSWERS(AQ_ERROR_NO_DEVICE, aq_ledger_of_device(runtime, 1, &name, NULL));
    ANSWERS(AQ_ERROR_NULL, aq_ledger_of_device(runtime, 0, NULL, NULL));
    char *pinned = NULL;
    OK(aq_ledger_of_pinned(runtime, &pinned, NULL));
    CHECK(!strcmp(pinned, "pinned-memory"));
    aq_text_free(pinned);

    void *stream = stream_of(runtime, 0);
    uint64_t blocks[20];
    for (int n = 0; n < 20; n++) blocks[n] = alloc(runtime, 0, 4 * MIB, stream);
    aq_ledger_options also = terms(name, capacity);
    aq_member member = 0;
    also.guarantee = 60 * MIB;
    ANSWERS(AQ_ERROR_OUT_OF_BUDGET, aq_ledger_join(&also, &member));
    also.guarantee = 50 * MIB;
    OK(aq_ledger_join(&also, &member));
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_ledger_claim(member, 50 * MIB, 0));
    /* What the runtime has in caches returns on the member's need. */
    for (int n = 5; n < 20; n++) OK(aq_free(runtime, 0, blocks[n]));
    OK(aq_ledger_claim(member, 50 * MIB, 60 * SECOND));
    uint64_t address = 0;
    ANSWERS(AQ_ERROR_OUT_OF_MEMORY, aq_alloc(runtime, 0, 60 * MIB, stream, &address));
    OK(aq_ledger_leave(member));
    OK(aq_free(runtime, 0, alloc(runtime, 0, 60 * MIB, stream)));
    for (int n = 0; n < 5; n++) OK(aq_free(runtime, 0, blocks[n]));
    in_order(runtime, 1);
    OK(aq_runtime_destroy(runtime));

    options.shared = 8;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    options.shared = 0;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_runtime_create(&options, &runtime));
    options.shared = AQ_SHARED_DEVICES | AQ_SHARED_RESERVED;
    options.shared_guarantee = 97 * MIB;
    ANSWERS(AQ_ERROR_BAD_SETTING, aq_runtime_create(&options, &runtime));
    aq_text_free(name);
}

/* The limits that administrators set for a process count beside its own. */
static void caps(void) {
    CHECK(setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=64,1=32", 1) == 0);
    const struct { const char *name; uint64_t limit, expected; } cases[] = {
        {"GPU-1", 0, 32}, {"GPU-1", 20, 20}, {"GPU-2", 0, 100}, {"simulated-0", 90, 64}, {"claims", 0, 100},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        aq_member member = join(cases[n].name, 0, cases[n].limit);
        uint64_t limit = 0;
        OK(aq_ledger_member(member, NULL, &limit, NULL, NULL));
        CHECK(limit == cases[n].expected);
        OK(aq_ledger_claim(member, limit, 0));
        ANSWERS(AQ_ERROR_OUT_OF_BUDGET, aq_ledger_claim(member, 1, 60 * SECOND));
        OK(aq_ledger_leave(member));
    }
    aq_member member = 7;
    aq_ledger_options options = terms("GPU-1", 100);
    options.guarantee = 33;
    ANSWERS(AQ_ERROR_BAD_ARGUMENT, aq_ledger_join(&options, &member));
    CHECK(setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a lot", 1) == 0);
    options = terms("own", 100);
    OK(aq_ledger_join(&options, &member));
    OK(aq_ledger_leave(member));
    options = terms("GPU-3", 100);
    ANSWERS(AQ_ERROR_BAD_SETTING, aq_ledger_join(&options, &member));
    CHECK(unsetenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == 0);
}

static void removes_folder(void) {
    const char *names[] = {"refused", "claims", "waits", "deaths", "simulated-0", "GPU-1", "GPU-2", "own"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s.ledger", folder, names[n]);
        CHECK(!remove(path));
    }
    CHECK(!remove(folder));
}

int main(void) {
    snprintf(folder, sizeof folder, "/tmp/aquifer-c-ledger-%d", (int)getpid());
    deaths();
    refusals();
    claims();
    waits();
    caps();
    runtimes();
    char *json = NULL;
    OK(aq_ledger_names(folder, &json));
    CHECK(!strcmp(json, "[\"GPU-1\",\"GPU-2\",\"claims\",\"deaths\",\"own\",\"refused\",\"simulated-0\",\"waits\"]"));
    aq_text_free(json);
    removes_folder();
    puts("ledger: claims end with their process");
    return 0;
}
