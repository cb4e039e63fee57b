/* A libc whose wall clock is ahead of the machine's by the seconds in the file $CLOCK_STAND_IN_AHEAD; LD_PRELOAD it.
 *
 * The file holds one int64, mapped once and read at each call. Clocks that are never set are left alone.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void map_it(void)
{
    const char *path = getenv("CLOCK_STAND_IN_AHEAD");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        ahead = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed == 0 && ahead != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found) != 0)
        return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found) != 0)
        return -1;
    if (now != NULL)
        *now = found.tv_sec;
    return found.tv_sec;
}
