/* The programs of a box: how pid 1 starts them, enforces their deadlines and memory limit, and reaps them. */
#include "sandbox.h"

EXPORTED char **body_arguments, **body_environment; /* for zygote.py, in a child that continues in Python */
EXPORTED int body_fds[MAX_FDS], body_count;

#define COMPARING 256

static struct { pid_t pid; uint32_t id, flags, reason; uint64_t begun, allowed, deadline, kills; } running[MAX_RUNNING];
static int alone = 1; /* no program was started yet, so none can run in the background */

uint64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000 + (uint64_t)at.tv_nsec;
}

/* Store pointers to `count` \0-terminated texts from `at` on in a NULL-terminated array. Returns the start of the next text. */
static char *split_texts(char *at, const char *end, uint32_t count, char **texts) {
    uint32_t i = 0;
    for (; i < count && at < end; i++) texts[i] = at, at += strlen(at) + 1;
    texts[i] = NULL;
    return at;
}

static void complain(const char *name, int error) {
    char text[512];
    int length = snprintf(text, sizeof text, "%.400s: %s\n", name, strerror(error));
    if (write(2, text, (size_t)length) < 0) _exit(126);
    _exit(error == ENOENT || error == ENOTDIR ? 127 : error == EACCES || error == ENOEXEC ? 126 : 127);
}

/* Execute a program, searched on the PATH as a shell does. */
static void execute(char **arguments, char **environment) {
    const char *path = "/usr/bin:/bin";
    char place[4096];
    int error = ENOENT;
    for (char **variable = environment; *variable; variable++)
        if (!strncmp(*variable, "PATH=", 5)) path = *variable + 5;
    if (strchr(arguments[0], '/')) {
        execve(arguments[0], arguments, environment);
        complain(arguments[0], errno);
    }
    for (const char *at = path; *at; at += *at == ':') {
        size_t length = strcspn(at, ":");
        snprintf(place, sizeof place, "%.*s/%s", (int)length, at, arguments[0]);
        execve(place, arguments, environment);
        if (errno != ENOENT && errno != ENOTDIR) error = errno;
        at += length;
    }
    complain(arguments[0], error);
}

/* In the new process: set up descriptors 0, 1 and 2, signals and limits, then drop privileges (`confine`). */
static void become_program(const int *fds, uint32_t flags, const char *directory, uint64_t milliseconds) {
    sigset_t none;
    int in = flags & WITH_STDIN ? fds[2] : open("/dev/null", O_RDONLY);
    if (dup2(in, 0) < 0 || dup2(fds[0], 1) < 0 || dup2(fds[1], 2) < 0) _exit(126);
    syscall(NR_close_range, 3, ~0U, 4 /* at exec */);
    sigemptyset(&none);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    umask(022);
    setpgid(0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    setpriority(PRIO_PROCESS, 0, 5);
    if (chdir(*directory ? directory : box.workdir)) complain(directory, errno);
    if (limit(flags & LAST ? milliseconds / 1000 + 2 : 0) || confine()) complain("isolate the program", errno);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static pid_t start_program(const struct request *request, char *text, const char *end, const int *fds) {
    static char *texts[8192];
    uint32_t arguments = request->count & 0xffff, variables = request->count >> 16;
    if (arguments == 0 || arguments + variables + 2 >= 8192) return errno = E2BIG, -1;
    const char *directory = text;
    text = split_texts(text + strlen(text) + 1, end, arguments, texts);
    split_texts(text, end, variables, texts + arguments + 1);
    if (request->flags & BODY) {
        pid_t pid = fork();
        if (pid) return pid;
        become_program(fds, request->flags, directory, request->milliseconds);
        syscall(NR_close_range, 3, ~0U, 0);
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
        body_arguments = texts;
        body_environment = texts + arguments + 1;
        body = PYTHON_BODY;
        return 0;
    }
    pid_t pid = vfork();
    if (pid < 0 && errno == EINVAL) pid = fork(); /* before Linux 6.1 no vfork into another time namespace */
    if (pid == 0) {
        become_program(fds, request->flags, directory, request->milliseconds);
        execute(texts, texts + arguments + 1);
    }
    return pid;
}

/* Fork an unconfined process that continues in zygote.py and writes the box's diff into the given file. */
static pid_t start_comparison(const int *fds) {
    pid_t pid = fork();
    if (pid) return pid;
    umask(022);
    if (fchdir(box.stage)) _exit(1);
    body_fds[body_count++] = fds[0];
    body_fds[body_count++] = open_base();
    body_fds[body_count++] = open(box.workdir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = box.kept - 1; i >= 0; i--) body_fds[body_count++] = open(box.lowers[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    body_fds[body_count++] = open("u", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    body = DIFF_BODY;
    return 0;
}

int run_request(const struct request *request, char *text, const char *end, int *fds, int count) {
    int slot = 0, comparing = request->operation == DIFF;
    while (slot < MAX_RUNNING && running[slot].pid) slot++;
    errno = EAGAIN;
    pid_t pid = -1;
    if (slot < MAX_RUNNING && count >= (comparing ? 1 : request->flags & WITH_STDIN ? 3 : 2)) {
        running[slot].begun = now();
        running[slot].kills = memory_kills();
        pid = comparing ? start_comparison(fds) : start_program(request, text, end, fds);
    }
    if (pid == 0) return body;
    if (pid < 0) {
        reply(REFUSED, request->id, errno, 0, 0, "start the program", NULL, 0);
        return 0;
    }
    running[slot].pid = pid;
    running[slot].id = request->id;
    running[slot].flags = comparing ? COMPARING : request->flags;
    running[slot].reason = ENDED;
    running[slot].allowed = request->milliseconds * 1000000;
    running[slot].deadline = running[slot].begun + running[slot].allowed;
    return 0;
}

/* Kill every process but this one and wait until each is gone. */
void end_all(void) {
    do kill(-1, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR);
}

void reap_box(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < MAX_RUNNING; i++)
            if (running[i].pid == pid) {
                int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
                uint64_t taken = now() - running[i].begun;
                running[i].pid = 0;
                if (running[i].reason == ENDED && code && memory_kills() > running[i].kills) running[i].reason = MEMORY;
                if (running[i].flags & LAST) end_all();
                reply(running[i].flags & COMPARING ? DIFF : EXEC, running[i].id, code, running[i].reason, taken, NULL, NULL, 0);
                if (running[i].flags & LAST) _exit(0);
            }
}

static void finish(int i, uint32_t reason) {
    if (!running[i].pid) return;
    if (running[i].reason == ENDED) running[i].reason = reason;
    if (running[i].flags & LAST) kill(-1, SIGKILL);
    else if (running[i].flags & COMPARING) kill(running[i].pid, SIGKILL);
    else kill_tree(running[i].pid);
    running[i].deadline = now() + 50000000; /* check again: it may have escaped while others were stopped */
}

void end_by_id(uint32_t id) {
    for (int i = 0; i < MAX_RUNNING; i++)
        if (running[i].pid && running[i].id == id) finish(i, KILLED);
}

/* Extend a program's deadline by the time that it waited for the processor because of other programs, unless it has used its timeout as
   processor time. It can hide processor time (children that nobody waits for), so it gets at most MAX_DEADLINE_FACTOR timeouts in all. */
static int extend_deadline(int i) {
    uint64_t used, delayed, allowed = running[i].allowed, most = (MAX_DEADLINE_FACTOR - 1) * allowed;
    if (running[i].reason != ENDED || running[i].flags & COMPARING || measure_time(running[i].pid, &used, &delayed) || used >= allowed)
        return 0;
    uint64_t time = now(), later = running[i].begun + allowed + (delayed < most ? delayed : most);
    if (later <= time) return 0;
    running[i].deadline = later < time + allowed - used ? later : time + allowed - used; /* check again once it may have used up its time */
    return 1;
}

/* Enforce deadlines, and the memory limit if no cgroup does. Returns the time to the next check in milliseconds, or -1 for no limit. */
int watch(void) {
    uint64_t time = now(), next = UINT64_MAX;
    int watching = settings.memory < 0, busy = 0;
    for (int i = 0; i < MAX_RUNNING; i++) busy += running[i].pid > 0;
    if (watching && (busy || !alone)) enforce_memory();
    if (busy) alone = 0;
    for (int i = 0; i < MAX_RUNNING; i++) {
        if (!running[i].pid) continue;
        if (running[i].deadline <= time && !extend_deadline(i)) finish(i, TIMEOUT);
        if (running[i].deadline < next) next = running[i].deadline;
    }
    int sleep = next == UINT64_MAX ? -1 : next <= time ? 0 : (int)((next - time) / 1000000 + 1);
    int tick = busy ? 10 : 100;
    return watching && (busy || !alone) && (sleep < 0 || sleep > tick) ? tick : sleep;
}

