/* Makes a folder look full or read-only to one process and its children, without rights and without a mount.
 *
 * LD_PRELOAD it. While FAULT_DISK_FLAG exists, calls that write below FAULT_DISK_PREFIX fail with FAULT_DISK_ERRNO
 * (ENOSPC or EROFS), and FAULT_DISK_FLAG.hit is made to prove it. Without the flag every call is passed on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static int is_armed(void) {
    const char *flag = getenv("FAULT_DISK_FLAG");
    return flag != NULL && syscall(SYS_faccessat, AT_FDCWD, flag, F_OK) == 0;
}

static int is_below(const char *path) {
    const char *prefix = getenv("FAULT_DISK_PREFIX");
    size_t length = prefix == NULL ? 0 : strlen(prefix);
    return length > 0 && strncmp(path, prefix, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

/* Refuse: leave a trace and set errno. */
static int refuse(void) {
    char hit[PATH_MAX];
    snprintf(hit, sizeof hit, "%s.hit", getenv("FAULT_DISK_FLAG"));
    long fd = syscall(SYS_openat, AT_FDCWD, hit, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) syscall(SYS_close, fd);
    errno = atoi(getenv("FAULT_DISK_ERRNO"));
    return -1;
}

static int is_read_only(void) { return atoi(getenv("FAULT_DISK_ERRNO")) == EROFS; }

static int fd_is_hit(int fd) {
    char link[64], path[PATH_MAX];
    int saved = errno;
    if (!is_armed()) return errno = saved, 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = '\0';
    return is_below(path);
}

static int path_is_hit(int directory, const char *path) {
    char whole[2 * PATH_MAX], base[PATH_MAX] = "";
    int saved = errno;
    if (path == NULL || !is_armed()) return errno = saved, 0;
    if (path[0] != '/') {
        char link[64];
        if (directory == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, base, sizeof base - 1);
        base[length < 0 ? 0 : length] = '\0';
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    } else snprintf(whole, sizeof whole, "%s", path);
    errno = saved;
    return is_below(whole);
}

/* A full disk refuses new files, a read-only one every writer. */
static int open_is_hit(int directory, const char *path, int flags) {
    if ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT)) return 0;
    if (!path_is_hit(directory, path)) return 0;
    if (is_read_only()) return (flags & O_ACCMODE) != O_RDONLY || syscall(SYS_faccessat, directory, path, F_OK) != 0;
    return (flags & O_CREAT) && syscall(SYS_faccessat, directory, path, F_OK) != 0;
}

#define MODE(last) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, last); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return open_is_hit(AT_FDCWD, path, flags) ? refuse() : NEXT(int, open, const char *, int, ...)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags)
    return open_is_hit(AT_FDCWD, path, flags) ? refuse() : NEXT(int, open64, const char *, int, ...)(path, flags, mode);
}

int openat(int at, const char *path, int flags, ...) {
    MODE(flags)
    return open_is_hit(at, path, flags) ? refuse() : NEXT(int, openat, int, const char *, int, ...)(at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...) {
    MODE(flags)
    return open_is_hit(at, path, flags) ? refuse() : NEXT(int, openat64, int, const char *, int, ...)(at, path, flags, mode);
}

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

FILE *fopen(const char *path, const char *how) {
    int writes = strpbrk(how, "wa+") != NULL;
    if (writes && open_is_hit(AT_FDCWD, path, O_WRONLY | O_CREAT)) return refuse(), NULL;
    return NEXT(FILE *, fopen, const char *, const char *)(path, how);
}

FILE *fopen64(const char *path, const char *how) { return fopen(path, how); }

#define ON_FD(type, name, formal, actual) \
    type name formal { return fd_is_hit(fd) ? refuse() : ((type(*) formal)dlsym(RTLD_NEXT, #name)) actual; }

ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, writev, (int fd, const struct iovec *parts, int n), (fd, parts, n))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
ON_FD(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))

#define ON_PATH(name, formal, actual, at, path, condition) \
    int name formal { \
        return path_is_hit(at, path) && (condition) ? refuse() : ((int(*) formal)dlsym(RTLD_NEXT, #name)) actual; \
    }

ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0)
ON_PATH(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path, syscall(SYS_faccessat, at, path, F_OK) != 0)
ON_PATH(rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
ON_PATH(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, 1)
ON_PATH(unlink, (const char *path), (path), AT_FDCWD, path, is_read_only())
ON_PATH(unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path, is_read_only())
ON_PATH(rmdir, (const char *path), (path), AT_FDCWD, path, is_read_only())
ON_PATH(chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, is_read_only())
ON_PATH(truncate, (const char *path, off_t size), (path, size), AT_FDCWD, path, is_read_only())
