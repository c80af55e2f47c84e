/* The zygote's loop: one clone per message. It runs in Python's only thread, and returns to Python in a child that continues in Python,
   when a layer must be attached, or at the end. */
#include "sandbox.h"

struct settings settings;
struct box box;
const char *step = "start";
EXPORTED int layer = -1; /* a detached mount that zygote.py must attach */
int body = NO_BODY; /* what zygote.py must do in a child; returned by `serve` */

static struct { pid_t pid; } slots[4096];

static void ignore_signal(int signal) { (void)signal; }

EXPORTED void configure(const struct settings *given) { settings = *given; }

static void reap(void) {
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
        for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
            if (slots[i].pid == pid) {
                slots[i].pid = 0;
                break;
            }
}

static int free_slot(void) {
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        if (!slots[i].pid) return (int)i;
    return -1;
}

/* Parse a message into `box`, which the child inherits. Returns 0, or -1 for an invalid message. */
static int parse_start(const char *message, size_t size) {
    if (size < sizeof box.start || message[size - 1]) return -1;
    memcpy(&box.start, message, sizeof box.start);
    const char *at = message + sizeof box.start, *end = message + size;
    if (box.start.lowers >= MAX_NAMES || box.start.binds > MAX_BINDS) return -1;
    box.workdir = at;
    for (uint32_t i = 0; i < box.start.lowers + 2 * box.start.binds; i++) {
        at += strlen(at) + 1;
        if (at >= end) return -1;
        *(i < box.start.lowers ? box.lowers + i : box.binds + (i - box.start.lowers)) = at;
    }
    return 0;
}

/* Report the failed step and errno to the host. */
static void refuse(int to) {
    struct answer refusal = {REFUSED, 0, errno, 0, 0};
    struct iovec parts[2] = {{&refusal, sizeof refusal}, {(void *)step, strlen(step)}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    sendmsg(to, &message, MSG_NOSIGNAL);
}

/* Make a mount point, in the zygote since the root is read-only in every box. */
static int make_place(const char *place) {
    char path[1024];
    step = "make the mount point of the workspace or of a mount";
    if (strlen(place) >= sizeof path) return errno = ENAMETOOLONG, -1;
    strcpy(path, place + 1);
    for (char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdirat(settings.root, path, 0755) && errno != EEXIST) return -1;
        *slash = '/';
    }
    return mkdirat(settings.root, path, 0755) && errno != EEXIST ? -1 : 0;
}

static int child(int control, int *fds, int count) {
    close(control);
    box.socket = fds[0];
    int blob = box.start.flags & BLOB ? fds[1] : -1, first = blob >= 0 ? 2 : 1;
    if (count - first < (int)box.start.mounts) {
        errno = EBADMSG;
        refuse(fds[0]);
        _exit(1);
    }
    if (set_up(blob, fds + first)) {
        refuse(box.socket);
        _exit(1);
    }
    for (int i = 1; i < count; i++) close(fds[i]);
    return serve_box();
}

static int start_box(int control, const char *message, size_t size, int *fds, int count) {
    if (count < 1 || parse_start(message, size)) return 0;
    int slot = free_slot();
    unsigned long flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | SIGCHLD;
    if (box.start.flags & OWN_NET) flags |= CLONE_NEWNET;
    box.start.slot = (uint32_t)slot;
    if (make_place(box.workdir)) return refuse(fds[0]), 0;
    for (uint32_t i = 0; i < box.start.binds; i++)
        if (make_place(box.binds[2 * i + 1])) return refuse(fds[0]), 0;
    step = "make new namespaces";
    long pid = slot < 0 ? (errno = EAGAIN, -1) : syscall(SYS_clone, flags, 0, 0, 0, 0);
    if (pid == 0) return child(control, fds, count);
    if (pid < 0) {
        refuse(fds[0]);
    } else {
        slots[slot].pid = (pid_t)pid;
    }
    return 0;
}

/* Start boxes until the host disconnects, then return 0. Returns ATTACH for a layer, and in a child that continues in Python its body. */
EXPORTED int serve(int control) {
    static char message[MESSAGE_BYTES];
    static char space[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    struct sigaction action = {.sa_handler = ignore_signal};
    sigset_t children, none;
    sigemptyset(&none);
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigaction(SIGCHLD, &action, NULL);
    sigprocmask(SIG_BLOCK, &children, NULL);
    for (;;) {
        reap();
        struct pollfd waiting = {.fd = control, .events = POLLIN};
        if (ppoll(&waiting, 1, NULL, &none) < 0) continue;
        struct iovec part = {message, sizeof message};
        struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
        ssize_t size = recvmsg(control, &header, MSG_CMSG_CLOEXEC);
        if (size == 0 || (size < 0 && errno != EINTR)) return 0;
        if (size < 0) continue;
        int fds[MAX_FDS], count = 0;
        struct cmsghdr *sent = CMSG_FIRSTHDR(&header);
        if (sent && sent->cmsg_type == SCM_RIGHTS) {
            count = (int)((sent->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(sent), (size_t)count * sizeof(int));
        }
        if (size >= (ssize_t)sizeof box.start && ((struct start *)message)->flags == LAYER) {
            layer = count ? fds[0] : -1;
            return ATTACH;
        }
        body = start_box(control, message, (size_t)size, fds, count);
        if (body) return body;
        for (int i = 0; i < count; i++) close(fds[i]);
    }
}
