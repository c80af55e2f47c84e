/* Bad weather for the processes of a run, preloaded into them: a disk that is slow or full, and a wall clock that is off.
 *
 * The file that OSTINATO_WEATHER names is mapped by every process and written by the examination: three 64-bit numbers,
 * microseconds that a sync takes longer, nanoseconds that the wall clock is ahead, and whether regular files take no more bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct weather {
    volatile int64_t sync_us, clock_ns, full;
};
static struct weather calm, *weather = &calm;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("OSTINATO_WEATHER");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(struct weather), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) weather = found;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void wait_for_disk(void) {
    if (weather->sync_us > 0) usleep((useconds_t)weather->sync_us);
}

static int refused(int file) {
    struct stat about;
    if (!weather->full || fstat(file, &about) || !S_ISREG(about.st_mode)) return 0;
    errno = ENOSPC;
    return 1;
}

int fsync(int file) { REAL(fsync); wait_for_disk(); return real(file); }
int fdatasync(int file) { REAL(fdatasync); wait_for_disk(); return real(file); }

ssize_t write(int file, const void *data, size_t size) { REAL(write); return refused(file) ? -1 : real(file, data, size); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { REAL(pwrite); return refused(file) ? -1 : real(file, data, size, at); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { REAL(pwrite64); return refused(file) ? -1 : real(file, data, size, at); }
ssize_t writev(int file, const struct iovec *parts, int count) { REAL(writev); return refused(file) ? -1 : real(file, parts, count); }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); return size > 0 && refused(file) ? -1 : real(file, size); }
int ftruncate(int file, off_t size) { REAL(ftruncate); return size > 0 && refused(file) ? -1 : real(file, size); }
int posix_fallocate(int file, off_t at, off_t size) { REAL(posix_fallocate); return refused(file) ? ENOSPC : real(file, at, size); }

int clock_gettime(clockid_t which, struct timespec *now) {
    REAL(clock_gettime);
    int done = real(which, now);
    if (!done && which == CLOCK_REALTIME && weather->clock_ns) {
        int64_t all = now->tv_sec * 1000000000LL + now->tv_nsec + weather->clock_ns;
        now->tv_sec = all / 1000000000LL;
        now->tv_nsec = all % 1000000000LL;
    }
    return done;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
