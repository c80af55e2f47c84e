/* Sets up a new box: its user, limits and mounts. Runs once in pid 1, which keeps its capabilities in its own user namespace. */
#include "sandbox.h"
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#define DO(what, call) do { step = what; if ((call) < 0) return -1; } while (0)

static int write_at(int directory, const char *path, const char *text) {
    int fd = openat(directory, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t written = write(fd, text, strlen(text));
    int error = errno;
    close(fd);
    errno = error;
    return written < 0 ? -1 : 0;
}

/* Map uid 1000 to uid 1000 of the zygote's namespace, and forbid further user namespaces. */
static int map_user(void) {
    DO("deny setgroups", write_at(settings.proc, "self/setgroups", "deny"));
    DO("map the user", write_at(settings.proc, "self/uid_map", "1000 1000 1"));
    DO("map the group", write_at(settings.proc, "self/gid_map", "1000 1000 1"));
    DO("forbid further user namespaces", write_at(settings.proc, "sys/user/max_user_namespaces", "0"));
    return 0;
}

/* Join this slot's memory group, which is empty since the slot's last box ended, and set the limit. */
static int join_memory(void) {
    char name[32], text[32];
    if (settings.memory < 0) return 0;
    snprintf(name, sizeof name, "b%u", box.start.slot);
    if (mkdirat(settings.memory, name, 0755) && errno != EEXIST) return -1;
    int group = openat(settings.memory, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (group < 0) return -1;
    snprintf(text, sizeof text, "%llu", (unsigned long long)box.start.memory);
    int one = settings.memory_version == 1;
    /* Swap must not add to the limit. These files are missing if the kernel does not count swap. */
    if (one) write_at(group, "memory.memsw.limit_in_bytes", "-1"); /* lifted first: it may not be below the new memory limit */
    int wrong = write_at(group, one ? "memory.limit_in_bytes" : "memory.max", text);
    if (!wrong) write_at(group, one ? "memory.memsw.limit_in_bytes" : "memory.swap.max", one ? text : "0");
    if (!wrong) wrong = write_at(group, "cgroup.procs", "0");
    box.memory_events = openat(group, one ? "memory.oom_control" : "memory.events", O_RDONLY | O_CLOEXEC);
    close(group);
    return wrong;
}

/* Give the box its own clock, cgroup tree and host name. */
static int hide_host(void) {
    if (settings.time_namespace) {
        struct timespec up;
        char text[96];
        clock_gettime(CLOCK_BOOTTIME, &up);
        snprintf(text, sizeof text, "monotonic -%lld 0\nboottime -%lld 0\n", (long long)up.tv_sec - 30, (long long)up.tv_sec - 30);
        DO("make a time namespace", unshare(CLONE_NEWTIME));
        DO("set the clock's start", write_at(settings.proc, "self/timens_offsets", text));
    }
    if (settings.cgroup_namespace) DO("make a cgroup namespace", unshare(CLONE_NEWCGROUP));
    DO("name the host", sethostname("workspace", 9));
    return 0;
}

static int raise_loopback(void) {
    struct ifreq device = {.ifr_flags = IFF_UP | IFF_RUNNING};
    strcpy(device.ifr_name, "lo");
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    int wrong = ioctl(fd, SIOCSIFFLAGS, &device);
    close(fd);
    return wrong;
}

/* Bound TCP buffers like other sockets' buffers. TCP grows its buffers by itself, to 32 MB and more, and no filter sees that. */
static int bound_tcp(void) {
    int wrong = write_at(settings.proc, "sys/net/ipv4/tcp_rmem", "4096 131072 " LARGEST_BUFFER);
    if (!wrong) wrong = write_at(settings.proc, "sys/net/ipv4/tcp_wmem", "4096 16384 " LARGEST_BUFFER);
    return wrong && errno == ENOENT ? 0 : wrong; /* a kernel without IPv4 */
}

int attach(int tree, const char *target) { return (int)syscall(NR_move_mount, tree, "", AT_FDCWD, target, 4 /* from: the descriptor itself */); }

/* Mount directories of the host, read-only. Must run before the stage is mounted over /tmp, which contains their sources. */
static int show_binds(void) {
    char name[32];
    for (uint32_t i = 0; i < box.start.binds; i++) {
        int tree;
        snprintf(name, sizeof name, "/tmp/layers/%s", box.binds[2 * i] + 1);
        DO("open a mount", tree = (int)syscall(NR_open_tree, AT_FDCWD, name, 1 | O_CLOEXEC | 0x8000 /* recursive */));
        DO("attach a mount", attach(tree, box.binds[2 * i + 1]));
        close(tree);
    }
    return 0;
}

/* Build the stage, the tmpfs with everything writable: t /tmp, s /dev/shm, f files, u upper, w overlay's workdir, h3 layers of the host. */
static int build_stage(const int *mounts) {
    char data[64], name[32];
    int trees[MAX_FDS], layers = (int)box.start.layers;
    for (int i = 0; i < layers && i < MAX_FDS; i++) { /* before the stage is mounted over /tmp, which contains their sources */
        snprintf(name, sizeof name, "/tmp/layers/%s", box.lowers[box.start.lowers - (uint32_t)layers + (uint32_t)i] + 1);
        DO("open a layer", trees[i] = (int)syscall(NR_open_tree, AT_FDCWD, name, 1 | O_CLOEXEC | 0x8000 /* recursive */));
    }
    snprintf(data, sizeof data, "size=%llu,nr_inodes=%u,mode=755", (unsigned long long)box.start.disk, box.start.inodes);
    DO("mount a tmpfs", mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, data));
    DO("enter the tmpfs", chdir("/tmp"));
    DO("open the tmpfs", box.stage = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC));
    DO("make /tmp", mkdir("t", 01777));
    if (!(box.start.flags & OVERLAY)) return 0;
    DO("make the stage", mkdir("s", 0777) | mkdir("f", 0755) | mkdir("u", 0755) | mkdir("w", 0755));
    for (int i = 0; i < layers; i++) {
        const char *target = box.lowers[box.start.lowers - (uint32_t)layers + (uint32_t)i];
        DO("make a layer's mount point", mkdir(target, 0755));
        DO("attach a layer", attach(trees[i], target));
        close(trees[i]);
    }
    for (uint32_t i = 0; i < box.start.mounts; i++) {
        snprintf(name, sizeof name, "a%u", i);
        DO("make an ancestor's mount point", mkdir(name, 0755));
        DO("attach an ancestor", attach(mounts[i], name));
    }
    return 0;
}

/* Unpack the files of one blob: {u32 name bytes, u32 mode, u64 size, name, \0, data} each. */
static int write_files(int blob, const char *below) {
    off_t size = lseek(blob, 0, SEEK_END), at = 0;
    int directory = open(below, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return -1;
    while (at < size) {
        struct { uint32_t name, mode; uint64_t size; } head;
        char name[4096];
        if (pread(blob, &head, sizeof head, at) != sizeof head || head.name >= sizeof name) return errno = EBADMSG, -1;
        if (pread(blob, name, head.name + 1, at + (off_t)sizeof head) != (ssize_t)head.name + 1) return errno = EBADMSG, -1;
        at += (off_t)sizeof head + head.name + 1;
        for (char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
            *slash = 0;
            if (mkdirat(directory, name, 0755) && errno != EEXIST) return -1;
            *slash = '/';
        }
        int fd = openat(directory, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, head.mode);
        if (fd < 0) return -1;
        for (uint64_t left = head.size; left;) {
            off_t from = at + (off_t)(head.size - left);
            ssize_t sent = syscall(SYS_sendfile, fd, blob, &from, left);
            if (sent <= 0) return errno = sent ? errno : ENOSPC, -1;
            left -= (uint64_t)sent;
        }
        at += (off_t)head.size;
        close(fd);
    }
    return close(directory);
}

/* Create an overlay mount. lowerdir+ takes directories one by one, hundreds in all; before Linux 6.7 all must fit into one option page. */
static int overlay(int with_upper, const char *const *lowers, uint32_t count) {
    int context = (int)syscall(NR_fsopen, "overlay", 1);
    if (context < 0) return -1;
    int wrong = (int)syscall(NR_fsconfig, context, 0, "userxattr", NULL, 0);
    for (uint32_t i = 0; i < count && !wrong; i++) wrong = (int)syscall(NR_fsconfig, context, 1, "lowerdir+", lowers[i], 0);
    if (wrong) {
        char *end = box.stack;
        for (uint32_t i = 0; i < count; i++) {
            if (end + strlen(lowers[i]) + 2 > box.stack + 4000) return errno = E2BIG, close(context), -1;
            end += sprintf(end, "%s%s", i ? ":" : "", lowers[i]);
        }
        wrong = (int)syscall(NR_fsconfig, context, 1, "lowerdir", box.stack, 0);
    }
    if (with_upper && !wrong) wrong = (int)syscall(NR_fsconfig, context, 1, "upperdir", "u", 0);
    if (with_upper && !wrong) wrong = (int)syscall(NR_fsconfig, context, 1, "workdir", "w", 0);
    if (!wrong) wrong = (int)syscall(NR_fsconfig, context, 6, NULL, NULL, 0);
    int mounted = wrong ? -1 : (int)syscall(NR_fsmount, context, 1, (with_upper ? 0 : 1) | 2 | 4);
    int error = errno;
    close(context);
    errno = error;
    return mounted;
}

int mount_overlay(void) {
    int tree;
    DO("overlay the layers", tree = overlay(1, box.lowers, box.start.lowers));
    DO("attach the overlay", attach(tree, box.workdir));
    return close(tree);
}

/* Open the box's original files as one read-only directory. A single lower directory needs no overlay. */
int open_base(void) {
    const char *const *lowers = box.lowers + box.kept;
    uint32_t count = box.start.lowers - (uint32_t)box.kept;
    return count == 1 ? open(lowers[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC) : overlay(0, lowers, count);
}

static int mount_all(int blob, const int *mounts) {
    int over = box.start.flags & OVERLAY;
    if (show_binds() || build_stage(mounts)) return -1;
    if (blob >= 0) DO("write the files (larger than the disk limit?)", write_files(blob, over ? "f" : "t"));
    if (over) {
        if (mount_overlay()) return -1;
        DO("mount /dev/shm", mount("s", "/dev/shm", NULL, MS_BIND, NULL));
    }
    if (box.start.flags & PROC) DO("mount /proc", mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid"));
    DO("mount /tmp", mount("t", "/tmp", NULL, MS_BIND, NULL)); /* last: it hides the stage */
    DO("enter the workspace", chdir(box.workdir));
    return 0;
}

int set_up(int blob, const int *mounts) {
    box.memory_events = box.proc = -1;
    umask(0);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    if (map_user()) return -1;
    DO("join a memory group", join_memory());
    if (hide_host()) return -1;
    if (box.start.flags & OWN_NET) {
        DO("raise the loopback device", raise_loopback());
        DO("bound TCP's buffers", bound_tcp());
    }
    if (mount_all(blob, mounts)) return -1;
    DO("build the Landlock rules", build_ruleset());
    DO("hide pid 1", prctl(PR_SET_DUMPABLE, 0, 0, 0, 0));
    return 0;
}
