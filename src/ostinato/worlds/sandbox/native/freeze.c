/* Forks of boxes: turns a box's writable layer into a read-only one, and makes detached mounts that other boxes can attach. */
#include "sandbox.h"

/* Make the overlay's upper directory its topmost lower one, below a new upper. EBUSY while a program's cwd is in the workspace. */
int freeze(void) {
    static char names[MAX_NAMES][8];
    if (box.start.lowers + 1 >= MAX_NAMES) return errno = E2BIG, -1;
    if (fchdir(box.stage)) return -1;
    if (umount2(box.workdir, UMOUNT_NOFOLLOW)) {
        int error = errno;
        if (chdir(box.workdir)) return -1;
        return errno = error, -1;
    }
    char *name = names[box.frozen];
    snprintf(name, sizeof *names, "l%d", box.frozen);
    if (rename("u", name) || mkdir("u", 0755)) return -1;
    memmove(box.lowers + 1, box.lowers, box.start.lowers * sizeof *box.lowers);
    box.lowers[0] = name;
    box.start.lowers++;
    box.frozen++;
    box.kept++; /* the number of lower directories added since the box's start */
    if (mount_overlay() || chdir(box.workdir)) return -1;
    if (box.ruleset >= 0) close(box.ruleset);
    return build_ruleset(); /* the rules refer to directories by inode, and the workspace's has changed */
}

/* Open `count` detached copies of a mount of the stage, as descriptors. */
int clones(const char *name, uint32_t count, int *fds) {
    for (uint32_t i = 0; i < count; i++) {
        fds[i] = (int)syscall(NR_open_tree, box.stage, name, 1 | O_CLOEXEC | (*name ? 0 : AT_EMPTY_PATH));
        if (fds[i] < 0) {
            while (i--) close(fds[i]);
            return -1;
        }
    }
    return 0;
}
