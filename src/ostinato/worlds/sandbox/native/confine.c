/* Drops a program's privileges before it starts. All of this is per-task state, so that a vfork child can set it before exec. */
#include "sandbox.h"

struct capabilities_header { uint32_t version; int pid; };

#define READING (1ULL << 0 | 1ULL << 2 | 1ULL << 3)           /* execute, read a file, read a directory */
#define WRITING (((1ULL << 13) - 1) & ~READING)               /* write, remove, create files of all kinds */
#define LATER(abi) ((abi) >= 2 ? 1ULL << 13 : 0)              /* refer */
#define TRUNCATE(abi) ((abi) >= 3 ? 1ULL << 14 : 0)

static int rule(int ruleset, const char *path, uint64_t rights) {
    struct { uint64_t rights; int fd; } __attribute__((packed)) beneath = {rights, open(path, O_PATH | O_CLOEXEC)};
    if (beneath.fd < 0) return errno == ENOENT ? 0 : -1;
    int wrong = (int)syscall(NR_landlock_add, ruleset, 1, &beneath, 0);
    close(beneath.fd);
    return wrong;
}

/* Build the Landlock rules: read everywhere, write in the box's own directories, no outside abstract sockets. They back up the mounts. */
int build_ruleset(void) {
    box.ruleset = -1;
    if (!settings.landlock) return 0;
    int abi = settings.landlock;
    uint64_t all = READING | WRITING | LATER(abi) | TRUNCATE(abi);
    struct { uint64_t files, net, scopes; } asked = {all, 0, abi >= 6 && !(box.start.flags & OWN_NET) ? 1 : 0};
    box.ruleset = (int)syscall(NR_landlock_create, &asked, abi >= 6 ? 24 : 8, 0);
    if (box.ruleset < 0) return -1;
    if (rule(box.ruleset, "/", READING)) return -1;
    if (rule(box.ruleset, "/dev", READING | 2 | TRUNCATE(abi))) return -1;
    if (rule(box.ruleset, "/tmp", all)) return -1;
    if (!(box.start.flags & OVERLAY)) return 0;
    return rule(box.ruleset, box.workdir, all) | rule(box.ruleset, "/dev/shm", all);
}

static int drop_capabilities(void) {
    struct capabilities_header header = {0x20080522, 0};
    uint32_t none[6] = {0};
    for (int capability = 0; capability < 64; capability++)
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)) break; /* the first capability that the kernel does not know */
    return (int)syscall(SYS_capset, &header, none);
}

static int set_limit(int which, uint64_t value) {
    struct rlimit both = {value, value};
    return setrlimit(which, &both);
}

/* Set the per-process limits. `seconds` limits the processor time; 0 means no limit. */
int limit(uint64_t seconds) {
    const struct start *start = &box.start;
    int wrong = set_limit(RLIMIT_NPROC, start->processes) | set_limit(RLIMIT_NOFILE, start->open_files) | set_limit(RLIMIT_CORE, 0);
    wrong |= set_limit(RLIMIT_FSIZE, start->disk) | set_limit(RLIMIT_MEMLOCK, 65536) | set_limit(RLIMIT_SIGPENDING, 256);
    wrong |= set_limit(RLIMIT_MSGQUEUE, 0) | set_limit(RLIMIT_RTPRIO, 0) | set_limit(RLIMIT_NICE, 0);
    if (start->address_space) wrong |= set_limit(RLIMIT_AS, start->address_space);
    if (seconds) wrong |= set_limit(RLIMIT_CPU, seconds);
    return wrong;
}

int confine(void) {
    struct { unsigned short length; const void *code; } program = {(unsigned short)settings.filter_instructions, settings.filter};
    int fd = openat(settings.proc, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) { /* the OOM killer must prefer programs */
        if (write(fd, "1000", 4) < 0) return -1;
        close(fd);
    }
    if (drop_capabilities() || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    if (box.ruleset >= 0 && syscall(NR_landlock_restrict, box.ruleset, 0)) return -1;
    return (int)syscall(SYS_seccomp, 1, 0, &program);
}
