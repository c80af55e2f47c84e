/* Access to single files of the workspace, for pid 1: no link and no ".." leads out of it. */
#include "sandbox.h"

#define BENEATH 0x08
#define NO_MAGIC_LINKS 0x02

static int root(void) { return open(box.workdir, O_PATH | O_DIRECTORY | O_CLOEXEC); }

static int beneath(int directory, const char *path, int flags, int mode) {
    struct { uint64_t flags, mode, resolve; } how = {(uint64_t)(unsigned)(flags | O_CLOEXEC), (uint64_t)mode, BENEATH | NO_MAGIC_LINKS};
    return (int)syscall(NR_openat2, directory, path, &how, sizeof how);
}

int open_beneath(const char *path, int flags, int mode) {
    int directory = root(), error;
    if (directory < 0) return -1;
    int fd = beneath(directory, path, flags, mode);
    error = errno;
    close(directory);
    errno = error;
    return fd;
}

/* Open the parent directory of a path, creating missing directories. `*name` becomes the path's last part. */
static int open_parent(char *path, const char **name) {
    int directory = root();
    *name = path;
    for (char *slash; directory >= 0 && (slash = strchr(*name, '/')); *name = slash + 1) {
        *slash = 0;
        int next = open_beneath(path, O_PATH | O_DIRECTORY, 0); /* from the top: a link may lead up and still stay inside */
        if (next < 0 && errno == ENOENT && !mkdirat(directory, *name, 0755)) next = open_beneath(path, O_PATH | O_DIRECTORY, 0);
        int error = errno;
        close(directory);
        errno = error;
        directory = next;
        *slash = '/';
    }
    return directory;
}

static int copy(int from, int to) {
    off_t size = lseek(from, 0, SEEK_END), at = 0;
    while (at < size) {
        ssize_t sent = syscall(SYS_sendfile, to, from, &at, (size_t)(size - at));
        if (sent <= 0) return errno = sent ? errno : ENOSPC, -1;
    }
    return 0;
}

/* Replace a file atomically, by a temporary file and a rename. */
int replace_beneath(const char *given, int from) {
    char path[4096], temporary[64];
    const char *name;
    struct stat old;
    if (strlen(given) >= sizeof path) return errno = ENAMETOOLONG, -1;
    strcpy(path, given);
    int directory = open_parent(path, &name);
    if (directory < 0) return -1;
    int known = !fstatat(directory, name, &old, AT_SYMLINK_NOFOLLOW);
    if (known && S_ISDIR(old.st_mode)) return close(directory), errno = EISDIR, -1;
    snprintf(temporary, sizeof temporary, ".%x-%lx", box.start.slot, (unsigned long)clock());
    int fd = openat(directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int wrong = fd < 0 || copy(from, fd) || fchmod(fd, known && S_ISREG(old.st_mode) ? old.st_mode & 0777 : 0644);
    wrong = wrong || renameat(directory, temporary, directory, name);
    int error = errno;
    if (fd >= 0) close(fd);
    if (wrong && fd >= 0) unlinkat(directory, temporary, 0);
    close(directory);
    errno = error;
    return wrong ? -1 : 0;
}
