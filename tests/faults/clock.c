/* Loaded before libfaketime 0.9.10, which shifts waits on the monotonic clock although it was told not to fake it:
 * clock_nanosleep fails with EINVAL, and a timerfd fires as much too late as the wall clock was set back.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) == 0 ? 0 : errno;
}

int timerfd_settime(int fd, int flags, const struct itimerspec *until, struct itimerspec *before) {
    return syscall(SYS_timerfd_settime, fd, flags, until, before);
}
