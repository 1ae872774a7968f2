// rlab: a small RC test program with known payloads and known mistakes.
//
//   rlab server  MODE [-p PORT] [-6] [-a ADDR]               listens with rdma_cm
//   rlab client  MODE [-p PORT] -a ADDR                      connects with rdma_cm
//   rlab tserver MODE [-p PORT] [-g GID] [-P PSN] [-M MTU]   without the CM: the numbers go over TCP,
//   rlab tclient MODE [-p PORT] -a ADDR [-g …] [-P …] [-M …] and the first PSN and the MTU are given
//
// Both sides take the same MODE:
//   basic      SEND, SEND with immediate, WRITE (5000 B), WRITE with immediate, READ (5000 B),
//              CMP_SWAP, FETCH_ADD, WRITE and READ of 0 B, a SEND back
//   inv        the server binds a type 2 memory window and sends its key; the client writes through
//              it, invalidates it with a SEND, writes again: NAK Remote Access Error
//   badrkey    WRITE with a wrong key: NAK Remote Access Error
//   badread    READ with a wrong key: the same
//   badatomic  FETCH_ADD with a wrong key: the same
//   unaligned  FETCH_ADD at address + 4: rxe refuses it at post_send, nothing is on the wire
//   oob        WRITE past the end of the region: NAK Remote Access Error
//   toolong    SEND longer than the receive: rxe answers NAK Remote Operational Error
//   rnr        the receive is posted 200 ms late: RNR NAKs, then success
//   rnrfail    it is never posted and rnr_retry is 2: RNR NAKs, then an error at the requester
//   reject     the server rejects the connection with private data
//   many       64 SENDs of 600 B, at most 4 under way: for loss and reordering
//   slowaccept the server takes 8 s to accept: its kernel answers the client's second REQ with an MRA
//   stale      the client asks for a second connection with the QP of the first: its REQ is rejected with
//              reason 10, and the server's kernel ends the first
//
// Payload byte i is 7 i + s: s = 1 SEND with immediate, 2 WRITE, 3 WRITE with immediate.
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    REGION = 65536,
    // offsets in the region, the same on both sides
    MW_AT = 4096,
    WRITE_AT = 8192,
    WRITE_IMM_AT = 16384,
    ATOMIC_AT = 32768,
    READ_TO = 40000,
    REPLY_FROM = 50000,
    REPLY_TO = 60000,
    SEND_FROM = 1000,
    ATOMIC_TO = 2000,

    BIG = 5000,
    MANY = 64,
    WINDOW = 4,
    RNR_TIMER = 22, // 20.48 ms
    SLOW = 8,       // seconds: longer than the 4.85 s after which rxe's CM repeats a REQ
    TIME_LIMIT = 60,
};

static const uint64_t ATOMIC_START = 0x1122334455667788ull, ATOMIC_SWAPPED = 0xaabbccddeeff0011ull;

static struct {
    const char *mode, *addr, *port;
    bool server, ipv6;
    int gid_index, mtu;
    uint32_t psn;
} opt = {.port = "18515", .gid_index = 1, .mtu = 1024};

static char *buf;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp *qp;
static uint64_t remote_addr;
static uint32_t remote_key;

static void die(const char *what)
{
    fprintf(stderr, "FAIL %s: %s\n", what, strerror(errno));
    exit(1);
}

static bool mode_is(const char *mode)
{
    return !strcmp(opt.mode, mode);
}

static bool wants_rnr(void)
{
    return mode_is("rnr") || mode_is("rnrfail");
}

static uint8_t rnr_retries(void)
{
    return mode_is("rnrfail") ? 2 : 7;
}

// ---- resources

static void make_resources(struct ibv_context *device)
{
    buf = aligned_alloc(4096, REGION);
    if (!buf)
        die("memory");
    memset(buf, 0, REGION);
    pd = ibv_alloc_pd(device);
    cq = ibv_create_cq(device, 256, NULL, NULL, 0);
    if (!pd || !cq)
        die("pd, cq");
    mr = ibv_reg_mr(pd, buf, REGION,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND);
    if (!mr)
        die("mr");
}

static struct ibv_qp_init_attr qp_attr(void)
{
    return (struct ibv_qp_init_attr){
        .send_cq = cq,
        .recv_cq = cq,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = {.max_send_wr = 128, .max_recv_wr = 128, .max_send_sge = 1, .max_recv_sge = 1},
    };
}

// ---- work requests

static void post_recv(uint32_t offset, uint32_t length)
{
    struct ibv_sge sge = {(uintptr_t)buf + offset, length, mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = 100 + offset, .sg_list = &sge, .num_sge = 1}, *bad;

    if (ibv_post_recv(qp, &wr, &bad))
        die("post_recv");
}

static void post_send(struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad;

    wr->send_flags = IBV_SEND_SIGNALED;
    if (ibv_post_send(qp, wr, &bad))
        die("post_send");
}

static struct ibv_wc poll_one(void)
{
    struct ibv_wc wc;
    int n;

    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        usleep(50);
    if (n < 0)
        die("poll_cq");
    return wc;
}

static void complete(const char *what)
{
    struct ibv_wc wc = poll_one();
    const char *status = ibv_wc_status_str(wc.status);

    // Where the status is an error, the other fields mean nothing.
    if (wc.status)
        printf("%s: status=%s(%d) opcode=-1 byte_len=0 imm=0x00000000 flags=0\n", what, status, wc.status);
    else
        printf("%s: status=%s(%d) opcode=%d byte_len=%u imm=0x%08x flags=%u\n", what, status, wc.status,
               (int)wc.opcode, wc.byte_len, wc.wc_flags & IBV_WC_WITH_IMM ? ntohl(wc.imm_data) : 0,
               wc.wc_flags);
    fflush(stdout);
}

// One operation from `local` in our region, and its completion. The remote fields are ignored by SENDs.
static void operation(const char *what, enum ibv_wr_opcode opcode, uint32_t local, uint32_t length,
                      uint32_t remote, uint32_t rkey, uint32_t imm)
{
    struct ibv_sge sge = {(uintptr_t)buf + local, length, mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = 1, .sg_list = &sge, .num_sge = length ? 1 : 0, .opcode = opcode, .imm_data = htonl(imm)};

    wr.wr.rdma.remote_addr = remote_addr + remote;
    wr.wr.rdma.rkey = rkey;
    post_send(&wr);
    complete(what);
}

static void send_bytes(const char *what, uint32_t local, uint32_t length)
{
    operation(what, IBV_WR_SEND, local, length, 0, 0, 0);
}

static void atomic(const char *what, enum ibv_wr_opcode opcode, uint32_t remote, uint32_t rkey,
                   uint64_t compare_add, uint64_t swap)
{
    struct ibv_sge sge = {(uintptr_t)buf + ATOMIC_TO, 8, mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = opcode};

    wr.wr.atomic.remote_addr = remote_addr + remote;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = compare_add;
    wr.wr.atomic.swap = swap;
    post_send(&wr);
    complete(what);
}

static void fill(uint32_t offset, int length, int seed)
{
    for (int i = 0; i < length; i++)
        buf[offset + i] = (char)(i * 7 + seed);
}

static uint64_t word_at(uint32_t offset)
{
    uint64_t word;

    memcpy(&word, buf + offset, sizeof word);
    return word;
}

// ---- what each mode does

// The receives that must be there before the connection is.
static void prepare(void)
{
    if (!opt.server) {
        if (mode_is("basic") || mode_is("inv"))
            post_recv(REPLY_TO, 64);
    } else if (mode_is("basic")) {
        for (uint32_t i = 0; i < 3; i++)
            post_recv(i * 512, 512);
        memcpy(buf + ATOMIC_AT, &ATOMIC_START, sizeof ATOMIC_START);
    } else if (mode_is("toolong")) {
        post_recv(0, 16);
    } else if (mode_is("inv") || mode_is("slowaccept")) {
        post_recv(0, 64);
    } else if (mode_is("many")) {
        for (int i = 0; i < MANY; i++)
            post_recv(0, 4000);
    }
}

static void client_basic(void)
{
    strcpy(buf + SEND_FROM, "hello rxe");
    send_bytes("SEND 10B", SEND_FROM, 10);
    fill(SEND_FROM, 100, 1);
    operation("SEND_IMM 100B", IBV_WR_SEND_WITH_IMM, SEND_FROM, 100, 0, 0, 0xdeadbeef);
    fill(WRITE_AT, BIG, 2);
    operation("WRITE 5000B", IBV_WR_RDMA_WRITE, WRITE_AT, BIG, WRITE_AT, remote_key, 0);
    fill(SEND_FROM, 33, 3);
    operation("WRITE_IMM 33B", IBV_WR_RDMA_WRITE_WITH_IMM, SEND_FROM, 33, WRITE_IMM_AT, remote_key,
              0xcafef00d);
    operation("READ 5000B", IBV_WR_RDMA_READ, READ_TO, BIG, WRITE_AT, remote_key, 0);
    printf("read-back %s\n", memcmp(buf + READ_TO, buf + WRITE_AT, BIG) ? "DIFFERS" : "same");
    atomic("CAS", IBV_WR_ATOMIC_CMP_AND_SWP, ATOMIC_AT, remote_key, ATOMIC_START, ATOMIC_SWAPPED);
    printf("CAS old %016llx\n", (unsigned long long)word_at(ATOMIC_TO));
    atomic("FADD", IBV_WR_ATOMIC_FETCH_AND_ADD, ATOMIC_AT, remote_key, 0x10, 0);
    printf("FADD old %016llx\n", (unsigned long long)word_at(ATOMIC_TO));
    operation("WRITE 0B", IBV_WR_RDMA_WRITE, 0, 0, WRITE_AT, remote_key, 0);
    operation("READ 0B", IBV_WR_RDMA_READ, 0, 0, WRITE_AT, remote_key, 0);
    send_bytes("SEND 3B", SEND_FROM, 3);
    complete("RECV from server");
    printf("got '%s'\n", buf + REPLY_TO);
}

static void server_basic(void)
{
    complete("RECV1");
    printf("got '%s'\n", buf);
    complete("RECV2");
    complete("RECV3 (write imm)");
    post_recv(0, 512);
    complete("RECV4");
    printf("atomic word now %016llx\n", (unsigned long long)word_at(ATOMIC_AT));
    strcpy(buf + REPLY_FROM, "bye from server");
    send_bytes("SEND back 16B", REPLY_FROM, 16);
}

static void client_inv(void)
{
    uint32_t key;

    complete("RECV mw rkey");
    memcpy(&key, buf + REPLY_TO, sizeof key);
    key = ntohl(key);
    printf("mw rkey 0x%08x\n", key);
    operation("WRITE via mw", IBV_WR_RDMA_WRITE, 0, 64, MW_AT, key, 0);

    struct ibv_sge sge = {(uintptr_t)buf, 20, mr->lkey};
    struct ibv_send_wr wr = {
        .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = key};
    post_send(&wr);
    complete("SEND_WITH_INV 20B");
    usleep(50000);
    operation("WRITE via invalidated mw", IBV_WR_RDMA_WRITE, 0, 64, MW_AT, key, 0);
}

static void server_inv(void)
{
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);

    if (!mw)
        die("alloc_mw");
    uint32_t key = ibv_inc_rkey(mw->rkey), wire = htonl(key);
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW};
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = key;
    wr.bind_mw.bind_info.mr = mr;
    wr.bind_mw.bind_info.addr = (uintptr_t)buf + MW_AT;
    wr.bind_mw.bind_info.length = 4096;
    wr.bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    post_send(&wr);
    complete("BIND_MW");
    memcpy(buf + REPLY_FROM, &wire, sizeof wire);
    printf("mw rkey 0x%08x\n", key);
    send_bytes("SEND mw rkey", REPLY_FROM, 4);
    complete("RECV (inv)");
}

static void client_many(void)
{
    int posted = 0, done = 0;

    while (done < MANY) {
        for (; posted < MANY && posted - done < WINDOW; posted++) {
            struct ibv_sge sge = {(uintptr_t)buf + (uint32_t)posted * 8, 600, mr->lkey};
            struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
            post_send(&wr);
        }
        struct ibv_wc wc = poll_one();
        if (wc.status) {
            printf("many: %s after %d\n", ibv_wc_status_str(wc.status), done);
            return;
        }
        done++;
    }
    printf("many: %d sends done\n", MANY);
}

static void server_many(void)
{
    for (int i = 0; i < MANY; i++) {
        struct ibv_wc wc = poll_one();
        if (wc.status) {
            printf("many recv %s at %d\n", ibv_wc_status_str(wc.status), i);
            return;
        }
    }
}

static void client_run(void)
{
    uint32_t wrong_key = remote_key ^ 0x55;

    if (mode_is("basic"))
        client_basic();
    else if (mode_is("inv"))
        client_inv();
    else if (mode_is("badrkey"))
        operation("WRITE bad rkey", IBV_WR_RDMA_WRITE, 0, 64, 0, wrong_key, 0);
    else if (mode_is("badread"))
        operation("READ bad rkey", IBV_WR_RDMA_READ, 0, 64, 0, wrong_key, 0);
    else if (mode_is("badatomic"))
        atomic("FADD bad rkey", IBV_WR_ATOMIC_FETCH_AND_ADD, 0, wrong_key, 1, 0);
    else if (mode_is("unaligned"))
        atomic("FADD unaligned", IBV_WR_ATOMIC_FETCH_AND_ADD, 4, remote_key, 1, 0);
    else if (mode_is("oob"))
        operation("WRITE out of bounds", IBV_WR_RDMA_WRITE, 0, 64, REGION - 32, remote_key, 0);
    else if (mode_is("toolong"))
        send_bytes("SEND 64B into 16B", 0, 64);
    else if (mode_is("rnr")) {
        strcpy(buf, "late");
        send_bytes("SEND (rnr)", 0, 5);
    } else if (mode_is("rnrfail"))
        send_bytes("SEND (rnrfail)", 0, 5);
    else if (mode_is("slowaccept"))
        send_bytes("SEND 5B", 0, 5);
    else if (mode_is("many"))
        client_many();
}

static void server_run(void)
{
    if (mode_is("basic"))
        server_basic();
    else if (mode_is("inv"))
        server_inv();
    else if (mode_is("rnr")) {
        usleep(200000);
        post_recv(0, 64);
        complete("RECV late");
    } else if (mode_is("slowaccept")) {
        complete("RECV");
    } else if (mode_is("many"))
        server_many();
    fflush(stdout);
}

// ---- connection with rdma_cm

// What the server puts behind its private data's text.
struct region_info {
    uint64_t addr;
    uint32_t rkey;
    uint32_t magic;
} __attribute__((packed));

enum { INFO_AT = 32, PRIVATE_DATA = 56, ANY_EVENT = -1, RESOLVE_MS = 2000 };

static struct addrinfo *resolve(const char *addr)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = opt.server ? AI_PASSIVE : 0}, *found;

    if (getaddrinfo(addr, opt.port, &hints, &found))
        die("getaddrinfo");
    return found;
}

static struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int wanted)
{
    struct rdma_cm_event *event;

    if (rdma_get_cm_event(channel, &event))
        die("get_cm_event");
    printf("event %s status %d pdlen %u", rdma_event_str(event->event), event->status,
           event->param.conn.private_data_len);
    if (event->param.conn.private_data_len)
        printf(" pd '%.24s'", (const char *)event->param.conn.private_data);
    printf("\n");
    fflush(stdout);
    if (wanted != ANY_EVENT && (int)event->event != wanted)
        exit(3);
    return event;
}

static void expect_event(struct rdma_event_channel *channel, int wanted)
{
    rdma_ack_cm_event(next_event(channel, wanted));
}

static struct rdma_conn_param conn_param(const char *private_data)
{
    return (struct rdma_conn_param){
        .private_data = private_data,
        .private_data_len = PRIVATE_DATA,
        .responder_resources = 4,
        .initiator_depth = 4,
        .retry_count = 7,
        .rnr_retry_count = rnr_retries(),
    };
}

static void make_cm_qp(struct rdma_cm_id *id)
{
    make_resources(id->verbs);
    struct ibv_qp_init_attr attr = qp_attr();
    if (rdma_create_qp(id, pd, &attr))
        die("create_qp");
    qp = id->qp;
    prepare();
}

static void cm_server(struct rdma_event_channel *channel, struct rdma_cm_id *listener)
{
    char data[PRIVATE_DATA] = "rlab-server-private-data";
    struct addrinfo *at = resolve(opt.addr ? opt.addr : opt.ipv6 ? "::" : "0.0.0.0");

    if (rdma_bind_addr(listener, at->ai_addr) || rdma_listen(listener, 4))
        die("listen");
    printf("listening\n");
    fflush(stdout);
    struct rdma_cm_event *event = next_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    if (mode_is("reject")) {
        if (rdma_reject(id, "rlab-reject", 12))
            die("reject");
        sleep(1);
        return;
    }
    if (mode_is("slowaccept"))
        sleep(SLOW);
    make_cm_qp(id);
    struct region_info info = {htobe64((uintptr_t)buf), htonl(mr->rkey), htonl(0x524c4142)};
    memcpy(data + INFO_AT, &info, sizeof info);
    printf("qpn 0x%06x rkey 0x%08x addr 0x%llx\n", qp->qp_num, mr->rkey, (unsigned long long)(uintptr_t)buf);
    fflush(stdout);
    struct rdma_conn_param param = conn_param(data);
    if (rdma_accept(id, &param))
        die("accept");
    expect_event(channel, RDMA_CM_EVENT_ESTABLISHED);
    if (wants_rnr()) {
        struct ibv_qp_attr attr = {.min_rnr_timer = RNR_TIMER};
        if (ibv_modify_qp(qp, &attr, IBV_QP_MIN_RNR_TIMER))
            die("min_rnr_timer");
    }
    server_run();
    expect_event(channel, RDMA_CM_EVENT_DISCONNECTED);
    rdma_disconnect(id);
    rdma_destroy_qp(id);
    rdma_destroy_id(id);
}

static void reach_server(struct rdma_event_channel *channel, struct rdma_cm_id *id)
{
    if (rdma_resolve_addr(id, NULL, resolve(opt.addr)->ai_addr, RESOLVE_MS))
        die("resolve_addr");
    expect_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    if (rdma_resolve_route(id, RESOLVE_MS))
        die("resolve_route");
    expect_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

// Asks for a connection with a QP that the rdma_cm does not look after.
static void connect_own_qp(struct rdma_cm_id *id)
{
    char data[PRIVATE_DATA] = "rlab-client-private-data";
    struct rdma_conn_param param = conn_param(data);

    param.qp_num = qp->qp_num;
    if (rdma_connect(id, &param))
        die("connect");
}

static void cm_client_stale(struct rdma_event_channel *channel, struct rdma_cm_id *old)
{
    struct rdma_cm_id *id;

    reach_server(channel, old);
    make_resources(old->verbs);
    struct ibv_qp_init_attr attr = qp_attr();
    qp = ibv_create_qp(pd, &attr);
    if (!qp)
        die("create_qp");
    printf("qpn 0x%06x\n", qp->qp_num);
    connect_own_qp(old);
    expect_event(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
    if (rdma_establish(old) || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
        die("establish");
    reach_server(channel, id);
    usleep(200000); // the server has the RTU
    connect_own_qp(id);
    // The REJ of the new connection and the DREQ of the old one, in either order.
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_event *event = next_event(channel, ANY_EVENT);
        printf("of the %s connection\n", event->id == old ? "old" : "new");
        if (event->id == old && rdma_disconnect(old))
            die("disconnect");
        rdma_ack_cm_event(event);
    }
    rdma_destroy_id(id);
    rdma_destroy_id(old);
}

static void cm_client(struct rdma_event_channel *channel, struct rdma_cm_id *id)
{
    char data[PRIVATE_DATA] = "rlab-client-private-data";

    reach_server(channel, id);
    make_cm_qp(id);
    printf("qpn 0x%06x\n", qp->qp_num);
    struct rdma_conn_param param = conn_param(data);
    if (rdma_connect(id, &param))
        die("connect");
    struct rdma_cm_event *event = next_event(channel, ANY_EVENT);
    if (event->event != RDMA_CM_EVENT_ESTABLISHED) {
        printf("not connected (event %s, status %d)\n", rdma_event_str(event->event), event->status);
        rdma_ack_cm_event(event);
        return;
    }
    struct region_info info;
    memcpy(&info, (const char *)event->param.conn.private_data + INFO_AT, sizeof info);
    rdma_ack_cm_event(event);
    remote_addr = be64toh(info.addr);
    remote_key = ntohl(info.rkey);
    printf("remote addr 0x%llx rkey 0x%08x\n", (unsigned long long)remote_addr, remote_key);
    if (wants_rnr())
        usleep(50000); // the server sets its RNR timer
    client_run();
    usleep(100000);
    rdma_disconnect(id);
    expect_event(channel, RDMA_CM_EVENT_DISCONNECTED);
    rdma_destroy_qp(id);
    rdma_destroy_id(id);
}

static void run_with_cm(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;

    if (!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
        die("create_id");
    if (opt.server)
        cm_server(channel, id);
    else if (mode_is("stale"))
        cm_client_stale(channel, id);
    else
        cm_client(channel, id);
}

// ---- connection over TCP

struct qp_info {
    uint64_t addr;
    union ibv_gid gid;
    uint32_t qpn, psn, rkey, unused;
};

static int tcp_connection(void)
{
    struct addrinfo *at = resolve(opt.addr);
    int one = 1, s = socket(at->ai_family, SOCK_STREAM, 0);

    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (!opt.server) {
        if (connect(s, at->ai_addr, at->ai_addrlen))
            die("connect");
        return s;
    }
    if (bind(s, at->ai_addr, at->ai_addrlen) || listen(s, 1))
        die("listen");
    printf("listening\n");
    fflush(stdout);
    return accept(s, NULL, NULL);
}

// Returns when the other side is here too.
static void exchange(int s, const void *ours, void *theirs, size_t length)
{
    if (write(s, ours, length) != (ssize_t)length ||
        recv(s, theirs, length, MSG_WAITALL) != (ssize_t)length)
        die("exchange");
}

static enum ibv_mtu mtu_code(int bytes)
{
    for (int code = IBV_MTU_256; code < IBV_MTU_4096; code++)
        if (bytes <= 128 << code)
            return (enum ibv_mtu)code;
    return IBV_MTU_4096;
}

static void to_init(void)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
    };

    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        die("INIT");
}

static void to_rts(const struct qp_info *peer)
{
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu_code(opt.mtu),
        .dest_qp_num = ntohl(peer->qpn),
        .rq_psn = ntohl(peer->psn),
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = RNR_TIMER,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.dgid = peer->gid, .sgid_index = (uint8_t)opt.gid_index, .hop_limit = 64}},
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = rnr_retries(),
        .sq_psn = opt.psn,
        .max_rd_atomic = 4,
    };

    if (ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        die("RTR");
    if (ibv_modify_qp(qp, &rts,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        die("RTS");
}

static void run_over_tcp(void)
{
    int devices;
    struct ibv_device **list = ibv_get_device_list(&devices);

    if (!list || !devices)
        die("no device");
    struct ibv_context *device = ibv_open_device(list[0]);
    if (!device)
        die("open_device");
    make_resources(device);
    struct ibv_qp_init_attr attr = qp_attr();
    qp = ibv_create_qp(pd, &attr);
    if (!qp)
        die("create_qp");
    to_init();
    prepare();

    struct qp_info ours = {.addr = htobe64((uintptr_t)buf),
                           .qpn = htonl(qp->qp_num),
                           .psn = htonl(opt.psn),
                           .rkey = htonl(mr->rkey)},
                   theirs;
    if (ibv_query_gid(device, 1, opt.gid_index, &ours.gid))
        die("query_gid");
    int s = tcp_connection();
    exchange(s, &ours, &theirs, sizeof ours);
    remote_addr = be64toh(theirs.addr);
    remote_key = ntohl(theirs.rkey);
    printf("local qpn 0x%06x psn 0x%06x rkey 0x%08x addr 0x%llx; remote qpn 0x%06x psn 0x%06x rkey 0x%08x\n",
           qp->qp_num, opt.psn, mr->rkey, (unsigned long long)(uintptr_t)buf, ntohl(theirs.qpn),
           ntohl(theirs.psn), remote_key);
    to_rts(&theirs);
    char ready = 0;
    exchange(s, &ready, &ready, 1);
    if (opt.server)
        server_run();
    else
        client_run();
    exchange(s, &ready, &ready, 1);
    usleep(50000);
}

int main(int argc, char **argv)
{
    int letter;

    if (argc < 3) {
        fprintf(stderr, "usage: rlab server|client|tserver|tclient MODE [-p PORT] [-a ADDR] [-6] "
                        "[-g GID] [-P PSN] [-M MTU]\n");
        return 2;
    }
    opt.server = strstr(argv[1], "server") != NULL;
    opt.mode = argv[2];
    optind = 3;
    while ((letter = getopt(argc, argv, "p:a:6g:P:M:")) > 0) {
        switch (letter) {
        case 'p': opt.port = optarg; break;
        case 'a': opt.addr = optarg; break;
        case '6': opt.ipv6 = true; break;
        case 'g': opt.gid_index = atoi(optarg); break;
        case 'P': opt.psn = (uint32_t)strtoul(optarg, NULL, 0); break;
        case 'M': opt.mtu = atoi(optarg); break;
        default: return 2;
        }
    }
    alarm(TIME_LIMIT);
    if (argv[1][0] == 't')
        run_over_tcp();
    else
        run_with_cm();
    printf("done\n");
    return 0;
}
