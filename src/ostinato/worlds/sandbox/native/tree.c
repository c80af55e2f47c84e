/* Lists the box's processes, measures and limits their resources, and kills a program with all its descendants. */
#include "sandbox.h"

#define MAX_PROCESSES 4096
#define SHARING 64 /* most processes for which shared memory is divided */
#define SOCKET_BYTES (2 * 212992) /* both buffers of a socket at LARGEST_BUFFER, which the filter lets nobody raise */
#define PIPE_BYTES 65536
#define MAX_QUEUES (1 << 16) /* size of the hash set of sockets and pipes; a power of two */

static struct { pid_t pid, parent; int marked; } known[MAX_PROCESSES];

/* Return a /proc that shows every process and that no program sees. Mounted at first use; -2 if the kernel refuses it. */
static int own_proc(void) {
    if (box.proc != -1) return box.proc;
    int context = (int)syscall(NR_fsopen, "proc", 1);
    box.proc = -2;
    if (context < 0) return -2;
    syscall(NR_fsconfig, context, 1, "subset", "pid", 0);
    if (!syscall(NR_fsconfig, context, 6, NULL, NULL, 0)) {
        int mounted = (int)syscall(NR_fsmount, context, 1, 0);
        if (mounted >= 0) box.proc = mounted;
    }
    close(context);
    return box.proc;
}

static ssize_t read_small(int pid, const char *file, char *text, size_t size) {
    char path[48];
    snprintf(path, sizeof path, "%d/%s", pid, file);
    int fd = openat(box.proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t length = read(fd, text, size - 1);
    close(fd);
    if (length >= 0) text[length] = 0;
    return length;
}

struct entry { uint64_t inode; int64_t offset; unsigned short length; unsigned char type; char name[]; };

/* List the box's pids, except pid 1. Returns their number, or -1 without a /proc. */
static int list(pid_t *pids, int most) {
    char space[8192];
    int count = 0;
    if (own_proc() < 0) return -1;
    int directory = openat(box.proc, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (ssize_t size; directory >= 0 && (size = syscall(SYS_getdents64, directory, space, sizeof space)) > 0;)
        for (ssize_t at = 0; at < size;) {
            struct entry *entry = (struct entry *)(space + at);
            pid_t pid = atoi(entry->name);
            if (pid > 1 && count < most) pids[count++] = pid;
            at += entry->length;
        }
    if (directory >= 0) close(directory);
    return count;
}

/* Mark `root` and its live descendants. Returns their number, or -1 without a /proc; `*others` counts the other live processes. */
static int mark(pid_t root, int *others) {
    static pid_t pids[MAX_PROCESSES];
    int count = list(pids, MAX_PROCESSES), kept = 0, found = 0;
    for (int i = 0; i < count; i++) {
        char text[512], *after;
        if (read_small(pids[i], "stat", text, sizeof text) <= 0 || !(after = strrchr(text, ')')) || after[2] == 'Z') continue;
        known[kept].pid = pids[i];
        known[kept].parent = atoi(after + 4);
        known[kept++].marked = pids[i] == root;
    }
    for (int more = 1; more;) {
        more = 0;
        for (int i = 0; i < kept; i++)
            for (int j = 0; j < kept && !known[i].marked; j++)
                if (known[j].marked && known[j].pid == known[i].parent) more = known[i].marked = 1;
    }
    for (int i = 0; i < kept; i++) found += known[i].marked;
    *others = kept - found;
    return count < 0 ? -1 : found;
}

/* Kill a program and its descendants. The program adopts its orphans (it is a subreaper and cannot stop being one), so that no descendant
   escapes. kill(-1) reaches every process of the namespace at once, so no fork slips through. To spare others, all are stopped while the
   descendants are selected. */
void kill_tree(pid_t root) {
    struct timespec moment = {0, 1000000};
    int others = 0;
    for (int round = 0; round < 1000; round++) {
        int found = mark(root, &others);
        if (found < 0 || (found && !others)) kill(-1, SIGKILL);
        if (found <= 0 || !others) break;
        kill(-1, SIGSTOP);
        found = mark(root, &others);
        for (int i = 0; i < found + others; i++)
            if (known[i].marked && (known[i].pid != root || found == 1)) kill(known[i].pid, SIGKILL);
        if (found <= 1) break; /* the root goes last, since its descendants are found through it */
        nanosleep(&moment, NULL);
    }
    kill(-1, SIGCONT);
}

/* Measure a program in nanoseconds: the processor time `used` by it, its live descendants and the children they waited for; and how long
   other programs `delayed` one of them. Time that a process waited for its own program's other processes does not count: it cannot exceed
   the time that these used. Returns 0, or -1 if the kernel has no scheduler statistics. */
int measure_time(pid_t root, uint64_t *used, uint64_t *delayed) {
    int others, told = -1, found = mark(root, &others);
    uint64_t tick = 1000000000 / (uint64_t)sysconf(_SC_CLK_TCK), most = 0;
    *used = *delayed = 0;
    for (int i = 0; found > 0 && i < found + others; i++) {
        unsigned long long own, late, part[4];
        char text[512], *after;
        if (!known[i].marked || read_small(known[i].pid, "schedstat", text, sizeof text) <= 0) continue;
        if (sscanf(text, "%llu %llu", &own, &late) != 2) continue;
        if (read_small(known[i].pid, "stat", text, sizeof text) <= 0 || !(after = strrchr(text, ')'))) continue;
        if (sscanf(after + 4, "%*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %llu %llu", part, part + 1, part + 2, part + 3) != 4) continue;
        uint64_t all = (part[0] + part[1]) * tick; /* of all its threads, in whole ticks; `own` is the first thread's, exact */
        *used += (all > own ? all : own) + (part[2] + part[3]) * tick;
        if (own + late > most) most = own + late;
        told = 0;
    }
    if (most > *used) *delayed = most - *used;
    return told;
}

static uint64_t field(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 10) : 0;
}

static uint64_t queues[MAX_QUEUES];
static int queue_count;

/* Return true for a socket or pipe not seen since `queue_count` was reset, since programs share theirs with forked children. */
static int is_new(uint64_t inode) {
    if (queue_count >= MAX_QUEUES / 2) return 1;
    for (uint64_t at = inode * 0x9E3779B97F4A7C15 >> 48;; at = (at + 1) % MAX_QUEUES) {
        if (queues[at] == inode) return 0;
        if (!queues[at]) return queues[at] = inode, ++queue_count;
    }
}

/* Return the kernel memory that a process's sockets and pipes may use. Their fill level is unknown, so each counts as full. */
static uint64_t queue_bytes(pid_t pid) {
    char path[48], space[8192], link[64];
    uint64_t bytes = 0;
    snprintf(path, sizeof path, "%d/fd", pid);
    int directory = openat(box.proc, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (ssize_t size; directory >= 0 && (size = syscall(SYS_getdents64, directory, space, sizeof space)) > 0;)
        for (ssize_t at = 0; at < size;) {
            struct entry *entry = (struct entry *)(space + at);
            ssize_t length = readlinkat(directory, entry->name, link, sizeof link - 1);
            link[length > 0 ? length : 0] = 0;
            if (!strncmp(link, "socket:[", 8) && is_new(strtoull(link + 8, NULL, 10))) bytes += SOCKET_BYTES;
            if (!strncmp(link, "pipe:[", 6) && is_new(strtoull(link + 6, NULL, 10))) bytes += PIPE_BYTES;
            at += entry->length;
        }
    if (directory >= 0) close(directory);
    return bytes;
}

/* Add each process's sockets and pipes to `bytes`, and return the sum; 0 between two scans. Scans take at most a tenth of the time, however
   many files the programs open. */
static uint64_t add_queues(const pid_t *pids, uint64_t *bytes, int count) {
    static uint64_t next;
    uint64_t begun = now(), sum = 0;
    if (begun < next) return 0;
    if (queue_count) memset(queues, 0, sizeof queues);
    queue_count = 0;
    for (int i = 0; i < count; i++) {
        uint64_t held = queue_bytes(pids[i]);
        bytes[i] += held;
        sum += held;
    }
    uint64_t ended = now();
    next = ended + 9 * (ended - begun);
    return sum;
}

static uint64_t watch_kills;

/* Return a process's proportional set size (PSS): its own memory plus its part of shared memory, as after a fork. It is at most `resident`,
   which counts shared memory in full. Reading it takes time in proportion to the memory. */
static uint64_t proportional(pid_t pid, uint64_t resident) {
    char text[4096];
    uint64_t own = 0;
    if (read_small(pid, "smaps_rollup", text, sizeof text) > 0) own = (field(text, "Pss_Anon:") + field(text, "Pss_Shmem:")) << 10;
    else if (read_small(pid, "status", text, sizeof text) <= 0 || !strstr(text, "RssAnon:")) return 0; /* it has ended */
    return own && own < resident ? own : resident;
}

/* Enforce the memory limit if no cgroup does: while the programs' memory, sockets and pipes and the box's tmpfs exceed it, kill the largest
   process, as the OOM killer does. If shared memory, counted in full for each process, would exceed the limit, it is divided among the
   processes, as long as there are at most `SHARING`. Not seen: descriptors in flight in a socket and open nowhere, and memory that is
   allocated and freed between two checks. */
void enforce_memory(void) {
    static pid_t pids[MAX_PROCESSES];
    static uint64_t bytes[MAX_PROCESSES], resident[MAX_PROCESSES];
    struct { long type, block, blocks, free, rest[16]; } space;
    char text[4096];
    int count = list(pids, MAX_PROCESSES);
    uint64_t used = syscall(SYS_fstatfs, box.stage, &space) ? 0 : (uint64_t)(space.blocks - space.free) * (uint64_t)space.block;
    for (int i = 0; i < count; i++) {
        bytes[i] = 0;
        if (read_small(pids[i], "status", text, sizeof text) > 0) bytes[i] = (field(text, "RssAnon:") + field(text, "RssShmem:")) << 10;
        used += resident[i] = bytes[i];
    }
    used += add_queues(pids, bytes, count);
    for (int i = 0; i < count && count <= SHARING && used > box.start.memory; i++) {
        uint64_t more = resident[i] - proportional(pids[i], resident[i]);
        bytes[i] -= more;
        used -= more;
    }
    while (used > box.start.memory && count > 0) {
        int largest = 0;
        for (int i = 1; i < count; i++)
            if (bytes[i] > bytes[largest]) largest = i;
        kill(pids[largest], SIGKILL);
        watch_kills++;
        used -= bytes[largest];
        pids[largest] = pids[--count];
        bytes[largest] = bytes[count];
    }
}

/* Return how many processes of the box were killed for lack of memory. */
uint64_t memory_kills(void) {
    char text[1024];
    if (box.memory_events < 0) return watch_kills;
    ssize_t length = pread(box.memory_events, text, sizeof text - 1, 0);
    if (length < 0) return 0;
    text[length] = 0;
    return field(text, "oom_kill ");
}
