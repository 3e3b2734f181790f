/* A pool of threads that sleeps between calls; items are handed out by a counter.
 *
 * Whoever calls waits for those who hold an item, never for one that has not begun: where other processes have the cores,
 * threads that find none cost nothing, and the caller does all of it itself. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 1000 /* some 20 microseconds: the next product of a step mostly comes within them, and waking costs more */

static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER; /* one parallel call at a time */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static int pool_size, wanted, is_open; /* under pool_lock */
static atomic_int inside;              /* members that may hold an item; changed under pool_lock */
static atomic_ulong generation;        /* likewise */
static pool_work current_work;
static const void *current_job;
static long current_items;
static atomic_long next_item;

static void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void take_items(int member) {
    for (long item; (item = atomic_fetch_add(&next_item, 1)) < current_items;)
        current_work(current_job, item, item + 1, member);
}

static void *pool_member(void *number) {
    const int member = (int)(intptr_t)number;
    unsigned long last = 0;
    for (;;) {
        for (int spins = 0; spins < SPINS && atomic_load(&generation) == last; spins++) pause_a_little();
        pthread_mutex_lock(&pool_lock);
        while (!is_open || generation == last || member > wanted) pthread_cond_wait(&wake, &pool_lock);
        last = generation;
        inside++;
        pthread_mutex_unlock(&pool_lock);
        take_items(member);
        pthread_mutex_lock(&pool_lock);
        if (--inside == 0 && !is_open) pthread_cond_signal(&done);
        pthread_mutex_unlock(&pool_lock);
    }
    return NULL;
}

/* Lets up to `members` threads of the pool, started on first use, have items. */
static void open_to(int members) {
    pthread_mutex_lock(&pool_lock);
    while (pool_size < members) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_member, (void *)(intptr_t)(pool_size + 1))) break;
        pthread_detach(thread);
        pool_size++;
    }
    wanted = members < pool_size ? members : pool_size;
    is_open = 1;
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&pool_lock);
}

static void close_and_wait(void) {
    pthread_mutex_lock(&pool_lock);
    is_open = 0;
    pthread_mutex_unlock(&pool_lock);
    for (int spins = 0; spins < SPINS && atomic_load(&inside); spins++) pause_a_little();
    pthread_mutex_lock(&pool_lock);
    while (inside) pthread_cond_wait(&done, &pool_lock);
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
    open_to(threads - 1);
    take_items(0);
    close_and_wait();
    pthread_mutex_unlock(&call_lock);
}
