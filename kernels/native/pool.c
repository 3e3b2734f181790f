/* A pool of threads that sleeps between calls; items are handed out by a counter. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER; /* one parallel call at a time */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static int pool_size, wanted, busy;
static unsigned long generation;
static pool_work current_work;
static const void *current_job;
static long current_items;
static atomic_long next_item;

static void take_items(int member) {
    for (long item; (item = atomic_fetch_add(&next_item, 1)) < current_items;)
        current_work(current_job, item, item + 1, member);
}

static void *pool_member(void *number) {
    const int member = (int)(intptr_t)number;
    unsigned long last = 0;
    pthread_mutex_lock(&pool_lock);
    for (;;) {
        while (generation == last || member > wanted) {
            last = generation;
            pthread_cond_wait(&wake, &pool_lock);
        }
        last = generation;
        pthread_mutex_unlock(&pool_lock);
        take_items(member);
        pthread_mutex_lock(&pool_lock);
        if (--busy == 0) pthread_cond_signal(&done);
    }
    return NULL;
}

/* Wakes up to `members` threads of the pool, started on first use. */
static void wake_members(int members) {
    pthread_mutex_lock(&pool_lock);
    while (pool_size < members) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_member, (void *)(intptr_t)(pool_size + 1))) break;
        pthread_detach(thread);
        pool_size++;
    }
    wanted = members < pool_size ? members : pool_size;
    busy = wanted;
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&pool_lock);
}

void run_parallel(pool_work work, const void *job, long items, int threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > items) threads = (int)items;
    if (threads <= 1) {
        if (items > 0) work(job, 0, items, 0);
        return;
    }
    pthread_mutex_lock(&call_lock);
    current_work = work;
    current_job = job;
    current_items = items;
    atomic_store(&next_item, 0);
    wake_members(threads - 1);
    take_items(0);
    pthread_mutex_lock(&pool_lock);
    while (busy) pthread_cond_wait(&done, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
    pthread_mutex_unlock(&call_lock);
}
