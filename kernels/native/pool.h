/* Threads that sleep between calls and share out the items of one. */
#ifndef KVFERRY_POOL_H
#define KVFERRY_POOL_H

#define MAX_THREADS 64

/* Does items `first` .. `last` - 1. `member` is 0 .. threads - 1, one at a time: a place in scratch memory. */
typedef void (*pool_work)(const void *job, long first, long last, int member);

/* Runs all items on the calling thread and up to `threads` - 1 others; returns when all are done. With one thread it
 * is one plain call over everything; with more, items go out one by one. Not to be called from inside a work. */
void run_parallel(pool_work work, const void *job, long items, int threads);

#endif
