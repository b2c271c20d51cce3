/* Threads that hand each other blocks: allocated on one's stream, used by the other's, freed by the other. */
#include "check.h"
#include <pthread.h>

enum { PAIRS = 4, ROUNDS = 25000, RING = 64 };

/* A ring from one thread to another. */
typedef struct ring {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t blocks[RING];
    unsigned first, count;
} ring;

typedef struct pair {
    aq_runtime runtime;
    void *giver, *taker;
    ring ring;
} pair;

static void *give(void *argument) {
    pair *p = argument;
    unsigned random = (unsigned)(uintptr_t)p->giver;
    for (int n = 0; n < ROUNDS; n++) {
        random = random * 1664525u + 1013904223u;
        uint64_t block = alloc(p->runtime, 0, 1 + (random >> 8) % 60000, p->giver);
        pthread_mutex_lock(&p->ring.mutex);
        while (p->ring.count == RING) pthread_cond_wait(&p->ring.changed, &p->ring.mutex);
        p->ring.blocks[(p->ring.first + p->ring.count++) % RING] = block;
        pthread_cond_broadcast(&p->ring.changed);
        pthread_mutex_unlock(&p->ring.mutex);
        /* Some are its own, and gone at once. */
        if (n % 4 == 0) OK(aq_free(p->runtime, 0, alloc(p->runtime, 0, 512, p->giver)));
    }
    return NULL;
}

static void *take(void *argument) {
    pair *p = argument;
    for (int n = 0; n < ROUNDS; n++) {
        pthread_mutex_lock(&p->ring.mutex);
        while (p->ring.count == 0) pthread_cond_wait(&p->ring.changed, &p->ring.mutex);
        uint64_t block = p->ring.blocks[p->ring.first];
        p->ring.first = (p->ring.first + 1) % RING;
        p->ring.count--;
        pthread_cond_broadcast(&p->ring.changed);
        pthread_mutex_unlock(&p->ring.mutex);
        if (n % 3 == 0) OK(aq_record_use(p->runtime, 0, block, p->taker, AQ_READ));
        OK(n % 5 == 0 ? aq_free_on(p->runtime, 0, block, p->taker) : aq_free(p->runtime, 0, block));
        if (n % 1000 == 0) {
            ANSWERS(AQ_ERROR_FOREIGN_BLOCK, aq_free(p->runtime, 0, 0x1000));
            CHECK(strstr(aq_last_error(), "0x1000") != NULL);
            OK(aq_trim(p->runtime, 0, 128u << 20, NULL));
            (void)stats_of(p->runtime, 0);
        }
    }
    return NULL;
}

/* Many call for a runtime that one of them destroys. */
static void *race(void *argument) {
    aq_runtime runtime = *(aq_runtime *)argument;
    uint64_t address;
    aq_status status;
    for (;;) {
        status = aq_alloc(runtime, 0, 4096, NULL, &address);
        if (status != AQ_OK) break;
        OK(aq_free(runtime, 0, address));
    }
    CHECK(status == AQ_ERROR_CLOSED);
    return NULL;
}

int main(void) {
    aq_runtime_options options = simulated(1);
    options.device_limit = 1u << 30;
    options.streams = AQ_STREAMS_RETIRED;
    aq_runtime runtime = create(&options);
    static pair pairs[PAIRS];
    pthread_t threads[2 * PAIRS];
    for (int n = 0; n < PAIRS; n++) {
        pair *p = &pairs[n];
        p->runtime = runtime;
        p->giver = stream_of(runtime, 0);
        p->taker = stream_of(runtime, 0);
        CHECK(!pthread_mutex_init(&p->ring.mutex, NULL) && !pthread_cond_init(&p->ring.changed, NULL));
        CHECK(!pthread_create(&threads[2 * n], NULL, give, p) && !pthread_create(&threads[2 * n + 1], NULL, take, p));
    }
    for (int n = 0; n < 2 * PAIRS; n++) CHECK(!pthread_join(threads[n], NULL));
    CHECK(stats_of(runtime, 0).allocations == (uint64_t)PAIRS * (ROUNDS + (ROUNDS + 3) / 4));
    for (int n = 0; n < PAIRS; n++) {
        OK(aq_stream_retire(runtime, 0, pairs[n].giver));
        ANSWERS(AQ_OK, aq_stream_retire(runtime, 0, pairs[n].taker));
        pthread_mutex_destroy(&pairs[n].ring.mutex);
        pthread_cond_destroy(&pairs[n].ring.changed);
    }
    OK(aq_trim(runtime, 0, 0, NULL));
    in_order(runtime, 1);
    aq_stats stats = stats_of(runtime, 0);
    CHECK(stats.physical == 0 && stats.cached == 0 && stats.pending == 0);
    OK(aq_runtime_destroy(runtime));

    for (int round = 0; round < 20; round++) {
        runtime = create(&options);
        for (int n = 0; n < 4; n++) CHECK(!pthread_create(&threads[n], NULL, race, &runtime));
        for (int n = 0; n < 50; n++) OK(aq_free(runtime, 0, alloc(runtime, 0, 512, NULL)));
        OK(aq_runtime_destroy(runtime));
        for (int n = 0; n < 4; n++) CHECK(!pthread_join(threads[n], NULL));
        uint64_t address;
        ANSWERS(AQ_ERROR_CLOSED, aq_free(runtime, 0, 4096));
        ANSWERS(AQ_ERROR_CLOSED, aq_alloc(runtime, 0, 1, NULL, &address));
    }
    puts("threads: counts are zero, and who came late was told so");
    return 0;
}
