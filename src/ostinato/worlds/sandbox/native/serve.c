/* Pid 1 of a box: reads and answers the host's requests. When it ends, everything in the box ends. */
#include "sandbox.h"
#include <netinet/in.h>
#include <sys/signalfd.h>

static char message[MESSAGE_BYTES];

void reply(uint32_t operation, uint32_t id, int32_t code, uint32_t reason, uint64_t nanoseconds, const char *text, int *fds, int count) {
    char space[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    struct answer answer = {operation, id, code, reason, nanoseconds};
    struct iovec parts[2] = {{&answer, sizeof answer}, {(void *)text, text ? strlen(text) : 0}};
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};
    if (count) {
        header.msg_control = space;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *sent = CMSG_FIRSTHDR(&header);
        sent->cmsg_level = SOL_SOCKET;
        sent->cmsg_type = SCM_RIGHTS;
        sent->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(sent), fds, sizeof(int) * (size_t)count);
    }
    while (sendmsg(box.socket, &header, MSG_NOSIGNAL) < 0 && errno == EINTR) continue;
}

static void file_request(const struct request *request, const char *path, int *fds, int count) {
    struct stat file;
    if (request->operation == WRITE) {
        int wrong = count == 1 && replace_beneath(path, fds[0]) ? errno : 0;
        reply(WRITE, request->id, wrong, 0, 0, NULL, NULL, 0);
        return;
    }
    int fd = open_beneath(path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    int wrong = fd < 0 ? errno : fstat(fd, &file) ? errno : S_ISDIR(file.st_mode) ? EISDIR : S_ISREG(file.st_mode) ? 0 : EINVAL;
    reply(READ, request->id, wrong, 0, 0, NULL, &fd, !wrong);
    if (fd >= 0) close(fd);
}

static void clone_request(const struct request *request, const char *name) {
    int fds[MAX_FDS], count = request->count > MAX_FDS ? MAX_FDS : (int)request->count;
    int wrong = clones(name, (uint32_t)count, fds) ? errno : 0;
    reply(CLONES, request->id, wrong, 0, 0, NULL, fds, wrong ? 0 : count);
    for (int i = 0; i < count && !wrong; i++) close(fds[i]);
}

/* Listen on a port of the box's loopback and pass the listening socket to the host. */
static void listen_request(const struct request *request) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)request->count), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int wrong = fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 64) ? errno : 0;
    reply(LISTEN, request->id, wrong, 0, 0, NULL, &fd, !wrong);
    if (fd >= 0) close(fd);
}

/* Handle one request. Returns 0, or in a child that continues in Python the `enum body`. */
static int answer(struct request *request, char *text, const char *end, int *fds, int count) {
    switch (request->operation) {
    case EXEC:
    case DIFF:
        return run_request(request, text, end, fds, count);
    case READ:
    case WRITE:
        file_request(request, text, fds, count);
        return 0;
    case FREEZE:
        reply(FREEZE, request->id, freeze() ? errno : 0, 0, 0, NULL, NULL, 0);
        return 0;
    case CLONES:
        clone_request(request, text);
        return 0;
    case LISTEN:
        listen_request(request);
        return 0;
    case KILL:
        end_by_id(request->id);
        return 0;
    default: /* STOP */
        end_all();
        reply(STOP, request->id, 0, 0, 0, NULL, NULL, 0);
        _exit(0);
    }
}

/* Report that the box is ready, with a pidfd of this process. */
static void reply_ready(void) {
    int fd = (int)syscall(NR_pidfd_open, getpid(), 0);
    reply(READY, 0, 0, 0, 0, NULL, &fd, fd >= 0);
    if (fd >= 0) close(fd);
}

/* Receive one message from the host and handle it. */
static int take_message(void) {
    static char space[CMSG_SPACE(sizeof(int) * 8)];
    struct iovec part = {message, sizeof message - 1};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t size = recvmsg(box.socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (size < (ssize_t)sizeof(struct request)) { /* the host disconnected */
        end_all();
        _exit(0);
    }
    message[size] = 0;
    int fds[8], count = 0;
    struct cmsghdr *sent = CMSG_FIRSTHDR(&header);
    if (sent && sent->cmsg_type == SCM_RIGHTS) {
        count = (int)((sent->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(sent), (size_t)count * sizeof(int));
    }
    int next = answer((struct request *)message, message + sizeof(struct request), message + size, fds, count);
    for (int i = 0; i < count && !next; i++) close(fds[i]);
    return next;
}

int serve_box(void) {
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    struct pollfd waiting[2] = {{box.socket, POLLIN, 0}, {signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC), POLLIN, 0}};
    if (box.start.flags & OVERLAY) reply_ready();
    for (;;) {
        struct signalfd_siginfo heard;
        int sleep = watch();
        if (poll(waiting, 2, sleep) < 0 && errno != EINTR) _exit(1);
        if (waiting[1].revents) {
            while (read(waiting[1].fd, &heard, sizeof heard) > 0) continue;
            reap_box();
        }
        if (waiting[0].revents) {
            int next = take_message();
            if (next) return next;
        }
    }
}
