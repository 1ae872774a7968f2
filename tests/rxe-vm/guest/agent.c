// Command agent of the guest, one process a virtio-serial port.
//   in:  one line, "ID base64(a shell script) ."
//   out: one line, "ID base64(what it printed) exit-status"
// Whoever asked and went away wants no answer: the script is ended. The ID tells a late answer from
// the next caller's, the dot a whole line from one that was cut off.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HANG_UP_MS = 500 };

static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static void *grow(void *p, size_t n)
{
    p = realloc(p, n);
    if (!p) {
        perror("agent");
        exit(1);
    }
    return p;
}

static void write_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0)
            return; // nobody is on the other side
        p += k;
        n -= k;
    }
}

// In place; returns the length.
static size_t decode(char *p, size_t n)
{
    size_t out = 0;
    unsigned acc = 0;
    int bits = 0;

    for (size_t i = 0; i < n; i++) {
        const char *d = p[i] ? strchr(DIGITS, p[i]) : NULL;
        if (!d)
            continue;
        acc = acc << 6 | (unsigned)(d - DIGITS);
        bits += 6;
        if (bits >= 8) {
            bits -= 8;
            p[out++] = (char)(acc >> bits);
        }
    }
    return out;
}

static size_t encode(char *out, const unsigned char *p, size_t n)
{
    size_t w = 0;

    for (size_t i = 0; i < n; i += 3) {
        unsigned x = (unsigned)p[i] << 16;
        if (i + 1 < n)
            x |= (unsigned)p[i + 1] << 8;
        if (i + 2 < n)
            x |= p[i + 2];
        out[w++] = DIGITS[x >> 18];
        out[w++] = DIGITS[x >> 12 & 63];
        out[w++] = i + 1 < n ? DIGITS[x >> 6 & 63] : '=';
        out[w++] = i + 2 < n ? DIGITS[x & 63] : '=';
    }
    return w;
}

static pid_t start(const char *script, int output)
{
    pid_t child = fork();

    if (child == 0) {
        setsid();
        dup2(open("/dev/null", O_RDONLY), 0);
        dup2(output, 1);
        dup2(output, 2);
        execl("/bin/sh", "sh", script, (char *)NULL);
        _exit(127);
    }
    return child;
}

// Whether nobody waits for the answer any more: the port is hung up, or a next caller writes already.
// That a port was opened reaches us by another way than what is written to it, sometimes later, and
// until then the port looks hung up (POLLHUP and POLLIN): only what lasts counts.
static bool abandoned(int port, int pause_ms, int *hung_up_ms)
{
    struct pollfd watched = {.fd = port, .events = POLLIN};

    if (poll(&watched, 1, pause_ms) <= 0) {
        *hung_up_ms = 0;
        return false;
    }
    usleep((useconds_t)pause_ms * 1000);
    *hung_up_ms += pause_ms;
    return *hung_up_ms >= HANG_UP_MS;
}

// Waits for the script's end, or ends it with its process group when it is abandoned. A program that
// the script left in the background holds nothing up: the output goes through a file, and only the
// script itself is waited for.
static int finish(pid_t child, int port)
{
    int status, pause_ms = 2, hung_up_ms = 0;

    if (child < 0)
        return 127;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (abandoned(port, pause_ms, &hung_up_ms)) {
            kill(-child, SIGTERM);
            usleep(100000);
            kill(-child, SIGKILL);
            waitpid(child, &status, 0);
            break;
        }
        if (pause_ms < 20)
            pause_ms++;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Cuts the last line of a buffer that ends with a line feed into ID and script; false if it is not
// whole. (There is one caller at a time: earlier lines are from callers that went away.)
static bool last_line(char *buf, size_t n, char **id, char **text)
{
    buf[n - 1] = 0;
    *id = strrchr(buf, '\n');
    *id = *id ? *id + 1 : buf;
    *text = strchr(*id, ' ');
    if (!*text)
        return false;
    *(*text)++ = 0;
    char *dot = strchr(*text, ' ');
    if (!dot || strcmp(dot, " ."))
        return false;
    *dot = 0;
    return true;
}

static void answer(int port, const char *id, int output, int status)
{
    off_t size = lseek(output, 0, SEEK_END);
    unsigned char *data = grow(NULL, (size_t)size + 1);
    char *line = grow(NULL, (size_t)size / 3 * 4 + strlen(id) + 64);
    ssize_t got = pread(output, data, (size_t)size, 0);
    size_t n = (size_t)sprintf(line, "%s ", id);

    n += encode(line + n, data, got > 0 ? (size_t)got : 0);
    n += (size_t)sprintf(line + n, " %d\n", status);
    write_all(port, line, n);
    free(data);
    free(line);
}

int main(int argc, char **argv)
{
    char script[64], out_name[64], *buf = NULL;
    size_t cap = 0, n = 0;

    if (argc != 2)
        return 2;
    int port = open(argv[1], O_RDWR | O_CLOEXEC);
    if (port < 0) {
        perror(argv[1]);
        return 1;
    }
    const char *name = strrchr(argv[1], '/') ? strrchr(argv[1], '/') + 1 : argv[1];
    snprintf(script, sizeof script, "/tmp/cmd.%s", name);
    snprintf(out_name, sizeof out_name, "/tmp/out.%s", name);

    for (;;) {
        if (cap - n < 65536)
            buf = grow(buf, cap = cap * 2 + 131072);
        ssize_t k = read(port, buf + n, 65536);
        if (k <= 0) { // nobody is on the other side
            usleep(20000);
            continue;
        }
        n += (size_t)k;
        if (buf[n - 1] != '\n')
            continue;
        char *id, *text;
        bool whole = last_line(buf, n, &id, &text);
        n = 0;
        if (!whole)
            continue;
        size_t length = decode(text, strlen(text));
        int file = open(script, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
        write_all(file, text, length);
        close(file);
        int output = open(out_name, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
        int status = finish(start(script, output), port);
        answer(port, id, output, status);
        close(output);
    }
}
