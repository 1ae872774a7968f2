// ops: one operation, or one mistake, a QP, between two programs that know what each must lead to.
//
//   ops server [-p PORT] [-g GID] [-M MTU] TEST…          answers the requests
//   ops client [-p PORT] -a ADDR [-g GID] [-M MTU] TEST…  makes them
//
// Both sides are given the same tests and go through them in step, over one TCP connection on which they tell each other
// their QPs. Each prints `TEST ok` or `TEST FAIL why`; both must say ok. tests/src/bin/ops_peer.rs speaks the same with
// uroce. What each test does stands in the table TESTS at the end.
//
// Byte i of the requester's memory is 7 i + 1, of the responder's 7 i + 3, before a test begins.
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_user_rxe.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    REGION = 1 << 17,
    // offsets, the same on both sides
    RECV_AT = 0,
    FROM_AT = 16384,
    TO_AT = 32768,
    RESULT_AT = 60000,
    WINDOW_AT = 61440,
    WINDOW_LEN = 4096,
    COUNTER_AT = 65536,
    ROUNDS_AT = 69632,

    BIG = 5000,
    PIECES = 32,
    PIECE = 97,
    ROUNDS = 64,
    ROUND_LEN = 600,
    ATOMICS = 100,
    DEPTH = 4,
    RNR_CODE = 18, // 5.12 ms
    LATE_MS = 200,
    PATIENCE_S = 20,
    OURS = 1,
    THEIRS = 3,
    // of verbs that this libibverbs may not know
    WR_FLUSH = 14,
    WR_ATOMIC_WRITE = 15,
    FLUSH_TYPE_GLOBAL = 1,
    KERNEL_WC_WITH_INV = 1 << 2,
    FLUSH_GLOBAL = 1 << 8,
};
static const uint32_t IMM = 0xdeadbeef;
static const uint64_t OLD = 0x1122334455667788, NEW = 0xaabbccddeeff0011;

static struct {
    bool client;
    const char *addr, *port;
    int gid, mtu;
} opt = {.port = "18516", .gid = 1, .mtu = 1024};

struct hello {
    uint64_t addr;
    union ibv_gid gid;
    uint32_t qpn, psn, rkey, no_rights, window, unused;
};

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_mr *mr, *no_rights;
static char *mem;
static int sock;
// of the running test
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mw *mw;
static struct hello peer;
static char why[256];

static void die(const char *what)
{
    fprintf(stderr, "ops: %s: %s\n", what, strerror(errno));
    exit(1);
}

// fail FORMAT…: notes the first reason; returns false.
static bool fail(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    if (!*why)
        vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return false;
}

// ---- memory

static uint8_t pattern(uint32_t at, int seed)
{
    return (uint8_t)(at * 7 + (uint32_t)seed);
}

static bool holds(const char *what, uint32_t at, uint32_t length, uint32_t from, int seed)
{
    for (uint32_t i = 0; i < length; i++)
        if ((uint8_t)mem[at + i] != pattern(from + i, seed))
            return fail("%s: byte %u is wrong", what, i);
    return true;
}

static uint64_t word(uint32_t at)
{
    uint64_t value;

    memcpy(&value, mem + at, 8);
    return value;
}

static bool word_is(const char *what, uint32_t at, uint64_t value)
{
    return word(at) == value || fail("%s is %llx", what, (unsigned long long)word(at));
}

// ---- work requests

static struct ibv_wc wc;

static bool next_completion(void)
{
    struct timespec now, begin;
    int n;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0) {
        usleep(50);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - begin.tv_sec > PATIENCE_S)
            return fail("no completion");
    }
    return n > 0 || fail("poll_cq");
}

static bool completes(const char *what, int status)
{
    if (!next_completion())
        return false;
    return (int)wc.status == status || fail("%s completed with %s", what, ibv_wc_status_str(wc.status));
}

static int pieces(struct ibv_sge *list, uint32_t at, uint32_t stride)
{
    for (uint32_t i = 0; i < PIECES; i++)
        list[i] = (struct ibv_sge){(uintptr_t)mem + at + i * stride, PIECE, mr->lkey};
    return PIECES;
}

static bool post_recv(uint32_t at, uint32_t length, bool split)
{
    struct ibv_sge list[PIECES] = {{(uintptr_t)mem + at, length, mr->lkey}};
    struct ibv_recv_wr wr = {.sg_list = list, .num_sge = split ? pieces(list, at, 2 * PIECE) : 1}, *bad;

    return !ibv_post_recv(qp, &wr, &bad) || fail("post_recv");
}

// One request; nothing is waited for.
static bool post(enum ibv_wr_opcode opcode, uint32_t at, uint32_t length, uint64_t remote, uint32_t rkey, bool split)
{
    struct ibv_sge list[PIECES] = {{(uintptr_t)mem + at, length, mr->lkey}};
    struct ibv_send_wr wr = {.opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .sg_list = list}, *bad;

    wr.num_sge = split ? pieces(list, at, 2 * PIECE) : length ? 1 : 0;
    if (opcode == IBV_WR_SEND_WITH_INV) {
        wr.invalidate_rkey = rkey;
    } else {
        wr.imm_data = htonl(IMM);
        wr.wr.rdma.remote_addr = remote;
        wr.wr.rdma.rkey = rkey;
    }
    return !ibv_post_send(qp, &wr, &bad) || fail("post_send: %s", strerror(errno));
}

static bool post_atomic(enum ibv_wr_opcode opcode, uint64_t remote, uint32_t rkey, uint64_t compare_add, uint64_t swap)
{
    struct ibv_sge sge = {(uintptr_t)mem + RESULT_AT, 8, mr->lkey};
    struct ibv_send_wr wr = {.opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1}, *bad;

    wr.wr.atomic.remote_addr = remote;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = compare_add;
    wr.wr.atomic.swap = swap;
    return !ibv_post_send(qp, &wr, &bad) || fail("post_send: %s", strerror(errno));
}

static bool does(const char *what, enum ibv_wr_opcode opcode, uint32_t at, uint32_t length, uint64_t offset,
                 uint32_t rkey, int status)
{
    return post(opcode, at, length, peer.addr + offset, rkey, false) && completes(what, status);
}

static bool adds(const char *what, uint64_t offset, uint32_t rkey, int status)
{
    return post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, peer.addr + offset, rkey, 1, 0) && completes(what, status);
}

static bool received(uint32_t length, unsigned flags)
{
    if (!completes("the receive", IBV_WC_SUCCESS))
        return false;
    if (wc.byte_len != length)
        return fail("%u bytes came", wc.byte_len);
    unsigned set = wc.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV | KERNEL_WC_WITH_INV);
    // rxe gives the kernel's flag, which user space would take for a checksum's.
    if (set != flags && (flags != IBV_WC_WITH_INV || set != KERNEL_WC_WITH_INV))
        return fail("the receive has flags %x", wc.wc_flags);
    return !(flags & IBV_WC_WITH_IMM) || ntohl(wc.imm_data) == IMM || fail("immediate %x", ntohl(wc.imm_data));
}

// ---- FLUSH and ATOMIC WRITE: this libibverbs knows too little of them, rxe's work queue is documented

static struct rxe_queue_buf *send_ring;

struct map {
    char *at, *end;
};

// The mappings of the verbs device.
static int device_maps(struct map *out, int room)
{
    char line[512];
    unsigned long begin, end;
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");

    while (maps && n < room && fgets(line, sizeof line, maps))
        if (strstr(line, "/uverbs") && sscanf(line, "%lx-%lx", &begin, &end) == 2)
            out[n++] = (struct map){(char *)begin, (char *)end};
    if (maps)
        fclose(maps);
    return n;
}

// A WRITE posted by the usual way shows which ring is the QP's: the one whose producer index has moved. It is left as
// it is, and what follows goes into the next slot. The kernel takes what the ring holds when the doorbell rings.
static struct rxe_send_wqe *next_slot(void)
{
    unsigned slot = send_ring->producer_index & send_ring->index_mask;

    return (struct rxe_send_wqe *)(send_ring->data + ((size_t)slot << send_ring->log2_elem_size));
}

static bool find_send_ring(void)
{
    struct map maps[64];
    int n = device_maps(maps, 64);
    unsigned before[64];

    for (int i = 0; i < n; i++)
        before[i] = ((struct rxe_queue_buf *)maps[i].at)->producer_index;
    if (!does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, 64, TO_AT, peer.rkey, 0))
        return false;
    for (int i = 0; i < n; i++) {
        struct rxe_queue_buf *ring = (struct rxe_queue_buf *)maps[i].at;
        // The completion queue's index moved too: its elements are smaller.
        if (ring->producer_index != before[i] && 1u << ring->log2_elem_size >= sizeof(struct rxe_send_wqe)) {
            send_ring = ring;
            return true;
        }
    }
    return fail("the send queue's ring is not found");
}

// As newer kernels read the union of `struct rxe_send_wr` for FLUSH.
struct flush_wr {
    uint64_t remote_addr;
    uint32_t length, rkey;
    uint8_t type, level;
};

// Puts a work request into the next slot, with up to 8 bytes of its own. Only posting by the library rings the doorbell,
// so a WRITE of nothing goes behind.
static bool post_raw(uint32_t opcode, uint64_t remote, const void *words, size_t size, const void *data,
                     size_t size_of_data, uint32_t length)
{
    struct rxe_send_wqe *wqe = next_slot();

    memset(wqe, 0, sizeof *wqe + 8);
    wqe->wr.opcode = opcode;
    wqe->wr.send_flags = IBV_SEND_SIGNALED;
    memcpy(&wqe->wr.wr, words, size);
    wqe->iova = remote;
    wqe->dma.length = wqe->dma.resid = length; // the length that RETH names
    memcpy(wqe->dma.inline_data, data, size_of_data);
    __atomic_store_n(&send_ring->producer_index, (send_ring->producer_index + 1) & send_ring->index_mask,
                     __ATOMIC_RELEASE);
    return post(IBV_WR_RDMA_WRITE, 0, 0, peer.addr, peer.rkey, false);
}

static bool post_flush(uint64_t offset, uint32_t length, uint32_t rkey, uint8_t level)
{
    struct flush_wr wr = {peer.addr + offset, length, rkey, FLUSH_TYPE_GLOBAL, level};

    return post_raw(WR_FLUSH, wr.remote_addr, &wr, sizeof wr, "", 0, length);
}

static bool post_atomic_write(uint64_t offset, uint32_t rkey)
{
    struct {
        uint64_t remote_addr;
        uint32_t rkey, reserved;
    } wr = {peer.addr + offset, rkey, 0};

    return post_raw(WR_ATOMIC_WRITE, wr.remote_addr, &wr, sizeof wr, mem + FROM_AT, 8, 8);
}

// ---- the tests, requester's side

static bool send_big(void) { return does("SEND", IBV_WR_SEND, FROM_AT, BIG, 0, 0, 0); }
static bool send_imm(void) { return does("SEND", IBV_WR_SEND_WITH_IMM, FROM_AT, 100, 0, 0, 0); }
static bool send_nothing(void) { return does("SEND", IBV_WR_SEND, FROM_AT, 0, 0, 0, 0); }
static bool write_big(void) { return does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, BIG, TO_AT, peer.rkey, 0); }
static bool write_imm(void) { return does("WRITE", IBV_WR_RDMA_WRITE_WITH_IMM, FROM_AT, 33, TO_AT, peer.rkey, 0); }
// Nothing is touched, so any key will do.
static bool write_nothing(void) { return does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, 0, TO_AT, 0x1234, 0); }
static bool read_nothing(void) { return does("READ", IBV_WR_RDMA_READ, TO_AT, 0, FROM_AT, 0x1234, 0); }

static bool send_pieces(void)
{
    return post(IBV_WR_SEND, FROM_AT, 0, 0, 0, true) && completes("SEND", 0);
}

static bool send_inv(void)
{
    return does("WRITE through the window", IBV_WR_RDMA_WRITE, FROM_AT, 64, WINDOW_AT, peer.window, 0) &&
           does("SEND", IBV_WR_SEND_WITH_INV, FROM_AT, 20, 0, peer.window, 0) &&
           does("WRITE through what was invalidated", IBV_WR_RDMA_WRITE, FROM_AT, 64, WINDOW_AT, peer.window,
                IBV_WC_REM_ACCESS_ERR);
}

static bool read_big(void)
{
    return does("READ", IBV_WR_RDMA_READ, TO_AT, BIG, FROM_AT, peer.rkey, 0) &&
           holds("READ", TO_AT, BIG, FROM_AT, THEIRS);
}

static bool read_pieces(void)
{
    if (!post(IBV_WR_RDMA_READ, TO_AT, 0, peer.addr + FROM_AT, peer.rkey, true) || !completes("READ", 0))
        return false;
    for (uint32_t i = 0; i < PIECES; i++)
        if (!holds("READ", TO_AT + i * 2 * PIECE, PIECE, FROM_AT + i * PIECE, THEIRS))
            return false;
    return true;
}

static bool compare_swap(void)
{
    uint64_t at = peer.addr + COUNTER_AT;

    return post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, at, peer.rkey, OLD, NEW) && completes("CMP_SWAP", 0) &&
           word_is("what was there", RESULT_AT, OLD) &&
           post_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, at, peer.rkey, OLD, 5) && completes("CMP_SWAP", 0) &&
           word_is("what was there then", RESULT_AT, NEW);
}

static bool fetch_add(void)
{
    for (int done = 0, posted = 0; done < ATOMICS; done++) {
        for (; posted < ATOMICS && posted - done < 2 * DEPTH; posted++)
            if (!post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, peer.addr + COUNTER_AT, peer.rkey, 3, 0))
                return false;
        if (!completes("FETCH_ADD", 0))
            return false;
    }
    return word_is("what was there", RESULT_AT, OLD + 3 * (ATOMICS - 1));
}

#define WRONG_KEY (peer.rkey ^ 0x5500)
static bool key_write(void) { return does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, 64, TO_AT, WRONG_KEY, 10); }
static bool key_read(void) { return does("READ", IBV_WR_RDMA_READ, TO_AT, 64, FROM_AT, WRONG_KEY, 10); }
static bool key_atomic(void) { return adds("FETCH_ADD", COUNTER_AT, WRONG_KEY, 10); }
static bool range_write(void) { return does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, 64, REGION - 32, peer.rkey, 10); }
static bool range_read(void) { return does("READ", IBV_WR_RDMA_READ, TO_AT, 64, REGION - 32, peer.rkey, 10); }
static bool range_atomic(void) { return adds("FETCH_ADD", REGION, peer.rkey, 10); }
// The end of the range wraps past zero.
static bool wrap_write(void) { return does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, 64, -peer.addr - 32, peer.rkey, 10); }
static bool right_write(void) { return does("WRITE", IBV_WR_RDMA_WRITE, FROM_AT, 64, TO_AT, peer.no_rights, 10); }
static bool right_read(void) { return does("READ", IBV_WR_RDMA_READ, TO_AT, 64, FROM_AT, peer.no_rights, 10); }
static bool right_atomic(void) { return adds("FETCH_ADD", COUNTER_AT, peer.no_rights, 10); }

// IBTA: an invalid request. rxe as responder says operational error.
static bool too_long(void)
{
    if (!post(IBV_WR_SEND, FROM_AT, 64, 0, 0, false) || !next_completion())
        return false;
    return wc.status == IBV_WC_REM_INV_REQ_ERR || wc.status == IBV_WC_REM_OP_ERR ||
           fail("SEND completed with %s", ibv_wc_status_str(wc.status));
}

static bool rnr_fail(void) { return does("SEND", IBV_WR_SEND, FROM_AT, 64, 0, 0, IBV_WC_RNR_RETRY_EXC_ERR); }
static bool retry_fail(void) { return does("SEND", IBV_WR_SEND, FROM_AT, 64, 0, 0, IBV_WC_RETRY_EXC_ERR); }

// A round: a SEND, a WRITE, a READ of something else, a FETCH_ADD.
static bool rounds(void)
{
    for (uint32_t done = 0, posted = 0; done < 4 * ROUNDS; done++) {
        for (; posted < ROUNDS && 4 * posted < done + 4 * DEPTH; posted++) {
            uint32_t at = ROUNDS_AT + posted * ROUND_LEN;
            if (!post(IBV_WR_SEND, at, ROUND_LEN, 0, 0, false) ||
                !post(IBV_WR_RDMA_WRITE, FROM_AT, BIG, peer.addr + TO_AT, peer.rkey, false) ||
                !post(IBV_WR_RDMA_READ, TO_AT, BIG, peer.addr + FROM_AT, peer.rkey, false) ||
                !post_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, peer.addr + COUNTER_AT, peer.rkey, 1, 0))
                return false;
        }
        if (!completes("a request", 0))
            return false;
    }
    return holds("READ", TO_AT, BIG, FROM_AT, THEIRS) && word_is("what was there", RESULT_AT, OLD + ROUNDS - 1);
}

static bool flush_range(void)
{
    return find_send_ring() && post(IBV_WR_RDMA_WRITE, FROM_AT, BIG, peer.addr + TO_AT, peer.rkey, false) &&
           completes("WRITE", 0) && post_flush(TO_AT, BIG, peer.rkey, 0) && completes("FLUSH", 0) &&
           completes("the WRITE behind", 0);
}

static bool flush_region(void)
{
    return find_send_ring() && post_flush(0, 0, peer.rkey, 1) && completes("FLUSH", 0) &&
           completes("the WRITE behind", 0);
}

static bool flush_key(void)
{
    return find_send_ring() && post_flush(TO_AT, BIG, WRONG_KEY, 0) && completes("FLUSH", IBV_WC_REM_ACCESS_ERR);
}

static bool atomic_write(void)
{
    return find_send_ring() && post_atomic_write(COUNTER_AT, peer.rkey) && completes("ATOMIC_WRITE", 0) &&
           completes("the WRITE behind", 0);
}

static bool atomic_write_key(void)
{
    return find_send_ring() && post_atomic_write(COUNTER_AT, WRONG_KEY) &&
           completes("ATOMIC_WRITE", IBV_WC_REM_ACCESS_ERR);
}

// ---- the tests, responder's side: before, and after the requester is done

static bool nothing(void) { return true; }
static bool one_receive(void) { return post_recv(RECV_AT, 8192, false); }
static bool short_receive(void) { return post_recv(RECV_AT, 16, false); }
static bool pieces_receive(void) { return post_recv(RECV_AT, 0, true); }

static bool late_receive(void)
{
    usleep(LATE_MS * 1000);
    return post_recv(RECV_AT, 8192, false);
}

static bool round_receives(void)
{
    for (uint32_t i = 0; i < ROUNDS; i++)
        if (!post_recv(ROUNDS_AT + i * ROUND_LEN, ROUND_LEN, false))
            return false;
    return true;
}

static bool make_window(void)
{
    mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    return (mw || fail("alloc_mw")) && one_receive();
}

// Once the QP can send.
static bool bind_window(void)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){.mr = mr,
                                                     .addr = (uintptr_t)mem + WINDOW_AT,
                                                     .length = WINDOW_LEN,
                                                     .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
    return (!ibv_post_send(qp, &wr, &bad) || fail("post_send of the bind")) && completes("BIND_MW", 0);
}

static bool got_big(void) { return received(BIG, 0) && holds("SEND", RECV_AT, BIG, FROM_AT, OURS); }
static bool got_imm(void) { return received(100, IBV_WC_WITH_IMM) && holds("SEND", RECV_AT, 100, FROM_AT, OURS); }
static bool got_nothing(void) { return received(0, 0); }
static bool got_late(void) { return received(BIG, 0) && holds("SEND", RECV_AT, BIG, FROM_AT, OURS); }
static bool got_write(void) { return holds("WRITE", TO_AT, BIG, FROM_AT, OURS); }
static bool got_write_imm(void) { return received(33, IBV_WC_WITH_IMM) && holds("WRITE", TO_AT, 33, FROM_AT, OURS); }
static bool untouched(void) { return holds("memory", 0, COUNTER_AT, 0, THEIRS) && word_is("the counter", COUNTER_AT, OLD); }
static bool got_swap(void) { return word_is("the word", COUNTER_AT, NEW); }
static bool got_adds(void) { return word_is("the counter", COUNTER_AT, OLD + 3 * ATOMICS); }

static bool got_pieces(void)
{
    if (!received(PIECES * PIECE, 0))
        return false;
    for (uint32_t i = 0; i < PIECES; i++)
        if (!holds("SEND", RECV_AT + i * 2 * PIECE, PIECE, FROM_AT + i * 2 * PIECE, OURS))
            return false;
    return true;
}

static bool got_inv(void)
{
    return received(20, IBV_WC_WITH_INV) && holds("WRITE", WINDOW_AT, 64, FROM_AT, OURS);
}

static bool got_too_long(void)
{
    return next_completion() && (wc.status != IBV_WC_SUCCESS || fail("the receive succeeded"));
}

static bool got_rounds(void)
{
    for (uint32_t i = 0; i < ROUNDS; i++)
        if (!received(ROUND_LEN, 0))
            return false;
    return holds("SENDs", ROUNDS_AT, ROUNDS * ROUND_LEN, ROUNDS_AT, OURS) && got_write() &&
           word_is("the counter", COUNTER_AT, OLD + ROUNDS);
}

static bool got_atomic_write(void)
{
    return holds("ATOMIC_WRITE", COUNTER_AT, 8, FROM_AT, OURS);
}

struct test {
    const char *name;
    bool (*prepare)(void); // responder, before the QPs meet
    bool (*request)(void); // requester
    bool (*check)(void);   // responder
    uint32_t psn;
    uint8_t rnr_retry, retry, timeout; // 0: 7, 7, 17
    bool late, deaf, window;           // responder: receives late; never listens; binds a window
};

enum { WRAP = 0xffffe0 };

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // what a test does not say is 0
static const struct test TESTS[] = {
    {"send", one_receive, send_big, got_big},
    {"send-imm", one_receive, send_imm, got_imm},
    {"send-0", one_receive, send_nothing, got_nothing},
    {"send-sge32", pieces_receive, send_pieces, got_pieces},
    {"send-inv", make_window, send_inv, got_inv, .window = true},
    {"write", nothing, write_big, got_write},
    {"write-imm", one_receive, write_imm, got_write_imm},
    {"write-0", nothing, write_nothing, untouched},
    {"read", nothing, read_big, untouched},
    {"read-0", nothing, read_nothing, untouched},
    {"read-sge32", nothing, read_pieces, untouched},
    {"cmp-swap", nothing, compare_swap, got_swap},
    {"fetch-add", nothing, fetch_add, got_adds},
    {"bad-key-write", nothing, key_write, untouched},
    {"bad-key-read", nothing, key_read, untouched},
    {"bad-key-atomic", nothing, key_atomic, untouched},
    {"bad-range-write", nothing, range_write, untouched},
    {"bad-range-read", nothing, range_read, untouched},
    {"bad-range-atomic", nothing, range_atomic, untouched},
    {"bad-range-wrap", nothing, wrap_write, untouched},
    {"no-right-write", nothing, right_write, untouched},
    {"no-right-read", nothing, right_read, untouched},
    {"no-right-atomic", nothing, right_atomic, untouched},
    {"too-long", short_receive, too_long, got_too_long},
    {"rnr", nothing, send_big, got_late, .late = true},
    {"rnr-exhausted", nothing, rnr_fail, untouched, .rnr_retry = 2},
    {"retry-exhausted", nothing, retry_fail, untouched, .retry = 2, .timeout = 12, .deaf = true},
    {"rounds", round_receives, rounds, got_rounds, .timeout = 14},
    {"psn-wrap", round_receives, rounds, got_rounds, .psn = WRAP, .timeout = 17},
    {"flush", nothing, flush_range, got_write},
    {"flush-region", nothing, flush_region, nothing},
    {"bad-key-flush", nothing, flush_key, nothing},
    {"atomic-write", nothing, atomic_write, got_atomic_write},
    {"bad-key-atomic-write", nothing, atomic_write_key, nothing},
};

// ---- a test's QP

static void exchange(const void *ours, void *theirs, size_t length)
{
    if (write(sock, ours, length) != (ssize_t)length ||
        recv(sock, theirs, length, MSG_WAITALL) != (ssize_t)length)
        die("the other side has gone");
}

static enum ibv_mtu mtu_code(void)
{
    for (int code = IBV_MTU_256; code < IBV_MTU_4096; code++)
        if (opt.mtu <= 128 << code)
            return (enum ibv_mtu)code;
    return IBV_MTU_4096;
}

static int rights(void)
{
    return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
}

static bool flushes; // the device has FLUSH

static bool make_qp(void)
{
    struct ibv_qp_init_attr init = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 128, .max_recv_wr = 128, .max_send_sge = PIECES, .max_recv_sge = PIECES}};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};

    cq = ibv_create_cq(device, 256, NULL, NULL, 0);
    init.send_cq = init.recv_cq = cq;
    qp = cq ? ibv_create_qp(pd, &init) : NULL;
    if (!qp)
        die("create_qp");
    attr.qp_access_flags = (unsigned)(rights() | (flushes ? FLUSH_GLOBAL : 0));
    return !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
           fail("INIT");
}

static bool connect_qp(const struct test *test)
{
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu_code(),
        .dest_qp_num = peer.qpn,
        .rq_psn = peer.psn,
        .max_dest_rd_atomic = DEPTH,
        .min_rnr_timer = RNR_CODE,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.dgid = peer.gid, .sgid_index = (uint8_t)opt.gid, .hop_limit = 64}},
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS,
        .timeout = test->timeout ? test->timeout : 17,
        .retry_cnt = test->retry ? test->retry : 7,
        .rnr_retry = test->rnr_retry ? test->rnr_retry : 7,
        .sq_psn = test->psn ? test->psn : 0x100,
        .max_rd_atomic = DEPTH,
    };

    if (ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return fail("RTR: %s", strerror(errno));
    return !ibv_modify_qp(qp, &rts,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC) ||
           fail("RTS: %s", strerror(errno));
}

static void meet(const struct test *test)
{
    struct hello ours = {.addr = htobe64((uintptr_t)mem),
                         .qpn = htonl(qp->qp_num),
                         .psn = htonl(test->psn ? test->psn : 0x100),
                         .rkey = htonl(mr->rkey),
                         .no_rights = htonl(no_rights->rkey),
                         .window = htonl(mw ? ibv_inc_rkey(mw->rkey) : 0)};

    if (ibv_query_gid(device, 1, opt.gid, &ours.gid))
        die("query_gid");
    exchange(&ours, &peer, sizeof ours);
    peer.addr = be64toh(peer.addr);
    peer.qpn = ntohl(peer.qpn);
    peer.psn = ntohl(peer.psn);
    peer.rkey = ntohl(peer.rkey);
    peer.no_rights = ntohl(peer.no_rights);
    peer.window = ntohl(peer.window);
}

static bool run(const struct test *test)
{
    char step = 0;
    bool ok;

    *why = 0;
    mw = NULL;
    for (uint32_t i = 0; i < REGION; i++)
        mem[i] = (char)pattern(i, opt.client ? OURS : THEIRS);
    memcpy(mem + COUNTER_AT, &OLD, 8);
    ok = make_qp() && (opt.client || test->prepare());
    meet(test);
    if (!test->deaf || opt.client)
        ok = ok && connect_qp(test);
    if (test->window && !opt.client)
        ok = ok && bind_window();
    exchange(&step, &step, 1);
    if (opt.client)
        ok = ok && test->request();
    else if (test->late)
        ok = ok && late_receive();
    exchange(&step, &step, 1);
    if (!opt.client)
        ok = ok && test->check();
    exchange(&step, &step, 1);
    ibv_destroy_qp(qp);
    if (mw)
        ibv_dealloc_mw(mw);
    ibv_destroy_cq(cq);
    return ok;
}

// ---- the run

static void open_device(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    device = list && *list ? ibv_open_device(*list) : NULL;
    pd = device ? ibv_alloc_pd(device) : NULL;
    mem = aligned_alloc(4096, REGION);
    if (!pd || !mem)
        die("device");
    memset(mem, 0, REGION);
    mr = ibv_reg_mr(pd, mem, REGION, rights() | IBV_ACCESS_MW_BIND | FLUSH_GLOBAL);
    flushes = mr != NULL;
    if (!mr)
        mr = ibv_reg_mr(pd, mem, REGION, rights() | IBV_ACCESS_MW_BIND);
    no_rights = ibv_reg_mr(pd, mem, REGION, IBV_ACCESS_LOCAL_WRITE);
    if (!mr || !no_rights)
        die("reg_mr");
}

static void open_socket(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(opt.port))};
    int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (opt.client) {
        if (inet_pton(AF_INET, opt.addr, &at.sin_addr) != 1 || connect(s, (struct sockaddr *)&at, sizeof at))
            die("connect");
        sock = s;
        return;
    }
    if (bind(s, (struct sockaddr *)&at, sizeof at) || listen(s, 1))
        die("listen");
    sock = accept(s, NULL, NULL);
    if (sock < 0)
        die("accept");
}

static const struct test *find(const char *name)
{
    for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++)
        if (!strcmp(TESTS[i].name, name))
            return &TESTS[i];
    fprintf(stderr, "ops: no test %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    int letter, failed = 0;

    if (argc < 3) {
        fprintf(stderr, "usage: ops server|client [-p PORT] [-a ADDR] [-g GID] [-M MTU] TEST...\n");
        return 2;
    }
    opt.client = !strcmp(argv[1], "client");
    optind = 2;
    while ((letter = getopt(argc, argv, "p:a:g:M:")) > 0) {
        switch (letter) {
        case 'p': opt.port = optarg; break;
        case 'a': opt.addr = optarg; break;
        case 'g': opt.gid = atoi(optarg); break;
        case 'M': opt.mtu = atoi(optarg); break;
        default: return 2;
        }
    }
    open_device();
    open_socket();
    for (; optind < argc; optind++) {
        bool ok = run(find(argv[optind]));
        printf("%s %s%s\n", argv[optind], ok ? "ok" : "FAIL ", ok ? "" : why);
        fflush(stdout);
        failed += !ok;
    }
    return failed ? 1 : 0;
}
