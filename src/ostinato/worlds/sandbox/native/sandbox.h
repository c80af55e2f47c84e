/* Shared declarations of the launcher: the wire protocol and the functions of each file. Little-endian hosts only, as in protocol.py. */
#ifndef OSTINATO_SANDBOX_H
#define LARGEST_BUFFER "212992" /* of a socket, in bytes: the kernel's default */
#define OSTINATO_SANDBOX_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* System call numbers that headers before 6.1 may lack; from 424 on they are the same on every architecture. */
#define NR_open_tree 428
#define NR_move_mount 429
#define NR_fsopen 430
#define NR_fsconfig 431
#define NR_fsmount 432
#define NR_pidfd_open 434
#define NR_close_range 436
#define NR_openat2 437
#define NR_mount_setattr 442
#define NR_landlock_create 444
#define NR_landlock_add 445
#define NR_landlock_restrict 446
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

#define EXPORTED __attribute__((visibility("default"))) /* exported to Python; other symbols are hidden, since libc has a `step` too */

#define MESSAGE_BYTES (160 << 10)
#define MAX_FDS 250
#define MAX_NAMES 1024
#define MAX_RUNNING 64
#define MAX_BINDS 16
#define MAX_DEADLINE_FACTOR 2 /* of a program's timeout: the longest it may take when it waits for the processor; as in protocol.py */

enum operation { EXEC = 1, READ, WRITE, FREEZE, CLONES, DIFF, KILL, STOP, LISTEN, READY = 100, REFUSED };
enum start_flag { OWN_NET = 1, PROC = 2, OVERLAY = 4, BLOB = 8, LAYER = 32 };
enum exec_flag { BODY = 1, LAST = 2, WITH_STDIN = 4 };
enum reason { ENDED = 0, TIMEOUT = 1, MEMORY = 2, KILLED = 3 };
enum body { NO_BODY = 0, PYTHON_BODY = 1, DIFF_BODY = 2, ATTACH = 3 };

struct start { /* host -> zygote; followed by \0-terminated texts: workdir, lower directories topmost first, and (layer, target) per bind */
    uint32_t flags, inodes, processes, open_files, lowers, layers, mounts, slot, binds, unused;
    uint64_t disk, memory, address_space;
};
struct request { /* host -> pid 1; followed by text */
    uint32_t operation, id, flags, count;
    uint64_t milliseconds;
};
struct answer { /* pid 1 -> host; followed by text */
    uint32_t operation, id;
    int32_t code;
    uint32_t reason;
    uint64_t nanoseconds;
};
struct settings { /* set once by the zygote; descriptors are -1 where the host lacks a feature */
    int proc;             /* /proc of a pid namespace that contains the box's processes */
    int memory;           /* a writable memory cgroup, in which each box gets its own group */
    int memory_version;   /* 1 or 2 */
    int landlock;         /* its ABI; 0: none */
    int time_namespace;
    int cgroup_namespace;
    int filter_instructions;
    int root;             /* the root tmpfs, writable, for making mount points */
    const void *filter;
};
struct box { /* the state of one box, in its pid 1 */
    struct start start;
    const char *workdir;
    const char *lowers[MAX_NAMES];
    const char *binds[2 * MAX_BINDS]; /* pairs: a directory of the host ("h3") and its read-only mount point */
    int socket, stage, ruleset, memory, memory_events, proc, frozen, kept;
    char stack[16384]; /* the lower directories as one option, "a:b", for kernels without lowerdir+ */
};

extern struct settings settings;
extern struct box box;
extern const char *step; /* the current step, reported if it fails */

/* setup.c */
int set_up(int blob, const int *mounts);
int mount_overlay(void);
int attach(int tree, const char *target);
/* freeze.c */
int freeze(void);
int clones(const char *name, uint32_t count, int *fds);
int open_base(void);
/* confine.c */
int build_ruleset(void);
int confine(void);
int limit(uint64_t seconds);
/* files.c */
int open_beneath(const char *path, int flags, int mode);
int replace_beneath(const char *path, int from);
/* tree.c */
void kill_tree(pid_t root);
int measure_time(pid_t root, uint64_t *used, uint64_t *delayed);
void enforce_memory(void);
uint64_t memory_kills(void);
/* program.c */
extern int body_fds[MAX_FDS], body_count, body;
int run_request(const struct request *request, char *text, const char *end, int *fds, int count);
void end_all(void);
void end_by_id(uint32_t id);
void reap_box(void);
uint64_t now(void);
int watch(void);
/* serve.c */
int serve_box(void);
void reply(uint32_t operation, uint32_t id, int32_t code, uint32_t reason, uint64_t nanoseconds, const char *text, int *fds, int count);

#endif
