/* Loaded ahead of the C library: counts the calls that change files below a folder, and if asked those that read them,
   and lets one of them fail, or kills or stops the process there. It can also set the clock of one process. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct {
    char folder[4096], first[64];
    atomic_long calls, number;
    atomic_int error, on, reads;
} none, *shared = &none;
#define prefix (off ? none.folder : shared->folder)
#define count shared->calls
#define nth shared->number
#define code shared->error
#define sticky shared->on
#define failed shared->first
static int off; /* of this process alone; all else is shared with those it forks */
enum { STOPS = 9997, KILLS = 9998, SHORT = 9999 };

__attribute__((constructor)) static void begin(void) {
    void *memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) shared = memory;
}

/* Count calls below `folder` from now on; let call `which` fail with `what` (0: none), and with `after` all after it. */
void faulty_arm(const char *folder, long which, int what, int after) {
    off = 0;
    strncpy(shared->folder, folder, sizeof shared->folder - 1);
    failed[0] = 0, count = 0, code = what, sticky = after, nth = which;
}
void faulty_reads(int too) { shared->reads = too; } /* count the calls that read, too */
void faulty_disarm(void) { off = 1; }
long faulty_count(void) { return count; }
const char *faulty_failed(void) { return failed; }

static int is_below(const char *path) {
    size_t size = strlen(prefix);
    return size && !strncmp(path, prefix, size) && (path[size] == '/' || !path[size]);
}
static int at(int folder, const char *path) {
    char link[64], found[4096];
    if (!prefix[0] || !path) return 0;
    if (path[0] == '/') return is_below(path);
    if (folder == AT_FDCWD) return getcwd(found, sizeof found) && is_below(found);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, found, sizeof found - 1);
    if (size < 0) return 0;
    found[size] = 0;
    return is_below(found);
}
static int opened(int descriptor) { return prefix[0] ? at(descriptor, ".") : 0; }
static int dies(void) { return code == KILLS || code == STOPS; }
static int fails(const char *name) { /* 0, or the error to give */
    long number = atomic_fetch_add(&count, 1) + 1;
    if (!nth || !(number == nth || (sticky && number > nth))) return 0;
    if (!failed[0]) strncpy(failed, name, sizeof shared->first - 1);
    if (!dies()) return code;
    kill(getpid(), code == KILLS ? SIGKILL : SIGSTOP);
    return 0;
}
/* A process that dies leaves what its calls have changed: opening to read, and syncing, change nothing. */
static int opens(int flags) { return !dies() || shared->reads || flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); }
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL(place, name) do { if (place) { int e = fails(name); if (e && e != SHORT) { errno = e; return -1; } } } while (0)

/* The clock of this process alone, and of those that it forks, goes wrong by so many seconds. */
static long shift;
void faulty_clock(long seconds) { shift = seconds; }
int clock_gettime(clockid_t clock, struct timespec *now) { REAL(int, clock_gettime, clockid_t, struct timespec *);
    int status = real(clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift;
    return status; }
int gettimeofday(struct timeval *now, void *zone) { REAL(int, gettimeofday, struct timeval *, void *);
    int status = real(now, zone); if (!status) now->tv_sec += shift; return status; }
time_t time(time_t *result) { struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec; return now.tv_sec; }
/* What a file gets as the time of now: NULL, or the shifted time. */
static const struct timespec *shifted(struct timespec now[2]) {
    if (!shift) return NULL;
    clock_gettime(CLOCK_REALTIME, now); now[1] = now[0]; return now; }

#define OPEN(name) int name(const char *path, int flags, ...) { \
    REAL(int, name, const char *, int, ...); va_list more; va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; va_end(more); \
    FAIL(opens(flags) && at(AT_FDCWD, path), "open"); return real(path, flags, mode); }
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { \
    REAL(int, name, int, const char *, int, ...); va_list more; va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; va_end(more); \
    FAIL(opens(flags) && at(folder, path), "open"); return real(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
#define FOPEN(name) FILE *name(const char *path, const char *how) { \
    REAL(FILE *, name, const char *, const char *); \
    if ((opens(0) || how[0] != 'r' || strchr(how, '+')) && at(AT_FDCWD, path)) { int e = fails("fopen"); if (e && e != SHORT) { errno = e; return NULL; } } return real(path, how); }
FOPEN(fopen) FOPEN(fopen64)

#define WRITE(name, args, call, given) ssize_t name args { \
    REAL(ssize_t, name, int, const void *, size_t, off_t); size_t all = size; \
    if (opened(descriptor)) { int e = fails("write"); if (e == SHORT) size = size > 1 ? size / 2 : size; \
        else if (e) { errno = e; return -1; } \
        if (dies()) { size /= 2; real call; size = all; fails("half a write"); } } return real call; }
WRITE(pwrite, (int descriptor, const void *data, size_t size, off_t start), (descriptor, data, size, start), 4)
WRITE(pwrite64, (int descriptor, const void *data, size_t size, off_t start), (descriptor, data, size, start), 4)
ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    size_t done = 0;
    if (descriptor > 2 && opened(descriptor)) { int e = fails("write"); if (e == SHORT) size = size > 1 ? size / 2 : size;
        else if (e) { errno = e; return -1; }
        if (dies()) { ssize_t half = real(descriptor, data, size / 2); if (half > 0) done = half; fails("half a write"); } }
    ssize_t rest = real(descriptor, (const char *)data + done, size - done);
    return rest < 0 ? rest : rest + done;
}
#define BY_NUMBER(name) int name(int descriptor) { REAL(int, name, int); FAIL(!dies() && opened(descriptor), #name); return real(descriptor); }
BY_NUMBER(fsync) BY_NUMBER(fdatasync)
#define SIZED(name) int name(int descriptor, off_t size) { REAL(int, name, int, off_t); FAIL(opened(descriptor), "truncate"); return real(descriptor, size); }
SIZED(ftruncate) SIZED(ftruncate64)
#define TAKE(name) int name(int descriptor, int mode, off_t start, off_t size) { REAL(int, name, int, int, off_t, off_t); \
    FAIL(opened(descriptor), "fallocate"); return real(descriptor, mode, start, size); }
TAKE(fallocate) TAKE(fallocate64)
int rename(const char *one, const char *other) { REAL(int, rename, const char *, const char *);
    FAIL(at(AT_FDCWD, other), "rename"); return real(one, other); }
int renameat(int a, const char *one, int b, const char *other) { REAL(int, renameat, int, const char *, int, const char *);
    FAIL(at(b, other), "rename"); return real(a, one, b, other); }
int renameat2(int a, const char *one, int b, const char *other, unsigned how) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned); FAIL(at(b, other), "exchange"); return real(a, one, b, other, how); }
int link(const char *one, const char *other) { REAL(int, link, const char *, const char *);
    FAIL(at(AT_FDCWD, other), "link"); return real(one, other); }
int linkat(int a, const char *one, int b, const char *other, int how) { REAL(int, linkat, int, const char *, int, const char *, int);
    FAIL(at(b, other), "link"); return real(a, one, b, other, how); }
int mkdir(const char *path, mode_t mode) { REAL(int, mkdir, const char *, mode_t); FAIL(at(AT_FDCWD, path), "mkdir"); return real(path, mode); }
int mkdirat(int a, const char *path, mode_t mode) { REAL(int, mkdirat, int, const char *, mode_t); FAIL(at(a, path), "mkdir"); return real(a, path, mode); }
int unlink(const char *path) { REAL(int, unlink, const char *); FAIL(at(AT_FDCWD, path), "unlink"); return real(path); }
int rmdir(const char *path) { REAL(int, rmdir, const char *); FAIL(at(AT_FDCWD, path), "rmdir"); return real(path); }
int unlinkat(int a, const char *path, int how) { REAL(int, unlinkat, int, const char *, int); FAIL(at(a, path), "unlink"); return real(a, path, how); }
int chmod(const char *path, mode_t mode) { REAL(int, chmod, const char *, mode_t); FAIL(at(AT_FDCWD, path), "chmod"); return real(path, mode); }
int fchmodat(int a, const char *path, mode_t mode, int how) { REAL(int, fchmodat, int, const char *, mode_t, int); FAIL(at(a, path), "chmod"); return real(a, path, mode, how); }
int symlink(const char *goal, const char *path) { REAL(int, symlink, const char *, const char *);
    FAIL(dies() && at(AT_FDCWD, path), "symlink"); return real(goal, path); }
int fchmod(int descriptor, mode_t mode) { REAL(int, fchmod, int, mode_t); FAIL(dies() && opened(descriptor), "chmod"); return real(descriptor, mode); }
int chown(const char *path, uid_t user, gid_t group) { REAL(int, chown, const char *, uid_t, gid_t);
    FAIL(dies() && at(AT_FDCWD, path), "chown"); return real(path, user, group); }
int utimensat(int a, const char *path, const struct timespec *times, int how) { REAL(int, utimensat, int, const char *, const struct timespec *, int);
    FAIL(dies() && path && at(a, path), "utime"); struct timespec now[2]; return real(a, path, times ? times : shifted(now), how); }
int futimens(int descriptor, const struct timespec *times) { REAL(int, futimens, int, const struct timespec *);
    struct timespec now[2]; return real(descriptor, times ? times : shifted(now)); }
int fchown(int descriptor, uid_t user, gid_t group) { REAL(int, fchown, int, uid_t, gid_t);
    FAIL(dies() && opened(descriptor), "chown"); return real(descriptor, user, group); }

#define READS(place) (shared->reads && (place))
#define READ(name, args, call) ssize_t name args { REAL(ssize_t, name, int, void *, size_t, off_t); \
    if (READS(descriptor > 2 && opened(descriptor))) { int e = fails("read"); if (e == SHORT) size = size > 1 ? size / 2 : size; \
        else if (e) { errno = e; return -1; } } return real call; }
READ(pread, (int descriptor, void *data, size_t size, off_t start), (descriptor, data, size, start))
READ(pread64, (int descriptor, void *data, size_t size, off_t start), (descriptor, data, size, start))
ssize_t read(int descriptor, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    if (READS(descriptor > 2 && opened(descriptor))) { int e = fails("read"); if (e == SHORT) size = size > 1 ? size / 2 : size;
        else if (e) { errno = e; return -1; } }
    return real(descriptor, data, size);
}
#define READV(name, more, given) ssize_t name(int descriptor, const struct iovec *parts, int parts_count, off_t start more) { \
    REAL(ssize_t, name, int, const struct iovec *, int, off_t more); \
    if (READS(opened(descriptor))) { int e = fails("read"); if (e == SHORT) parts_count = parts_count > 1 ? parts_count / 2 : parts_count; \
        else if (e) { errno = e; return -1; } } return real(descriptor, parts, parts_count, start given); }
#define NONE
#define FLAGS , int flags
#define FLAGS_GIVEN , flags
READV(preadv, NONE, NONE) READV(preadv64, NONE, NONE) READV(preadv2, FLAGS, FLAGS_GIVEN) READV(preadv64v2, FLAGS, FLAGS_GIVEN)
#define MAPPED(name) void *name(void *where, size_t size, int how, int flags, int descriptor, off_t start) { \
    REAL(void *, name, void *, size_t, int, int, int, off_t); \
    if (READS(descriptor > 2 && opened(descriptor))) { int e = fails("mmap"); if (e && e != SHORT) { errno = e; return MAP_FAILED; } } \
    return real(where, size, how, flags, descriptor, start); }
MAPPED(mmap) MAPPED(mmap64)
#define STAT(name, type) int name(const char *path, struct type *found) { REAL(int, name, const char *, struct type *); \
    FAIL(READS(at(AT_FDCWD, path)), "stat"); return real(path, found); }
STAT(stat, stat) STAT(lstat, stat) STAT(stat64, stat64) STAT(lstat64, stat64)
#define FSTAT(name, type) int name(int descriptor, struct type *found) { REAL(int, name, int, struct type *); \
    FAIL(READS(descriptor > 2 && opened(descriptor)), "stat"); return real(descriptor, found); }
FSTAT(fstat, stat) FSTAT(fstat64, stat64)
#define FSTATAT(name, type) int name(int folder, const char *path, struct type *found, int flags) { \
    REAL(int, name, int, const char *, struct type *, int); FAIL(READS(at(folder, path)), "stat"); return real(folder, path, found, flags); }
FSTATAT(fstatat, stat) FSTATAT(fstatat64, stat64)
DIR *opendir(const char *path) { REAL(DIR *, opendir, const char *);
    if (READS(at(AT_FDCWD, path))) { int e = fails("opendir"); if (e && e != SHORT) { errno = e; return NULL; } } return real(path); }
DIR *fdopendir(int descriptor) { REAL(DIR *, fdopendir, int);
    if (READS(opened(descriptor))) { int e = fails("opendir"); if (e && e != SHORT) { errno = e; return NULL; } } return real(descriptor); }
