// target: a QP to shoot at, for tests/src/bin/bad_packets_at_rxe.rs.
//
//   target PORT GID MTU
//
// Takes one TCP connection and, on it, a line a command; answers each with a line.
//   new TYPE DEPTH RIGHTS RECEIVES BYTES STATE PSN PEER-QPN PEER-GID
//                              a fresh QP (rc, uc, ud) in STATE (reset, init, rtr, rts, err); RECEIVES receives of BYTES
//                              (negative: of a key that does not exist): "qpn addr rkey"
//   key rights BITS | pd | gone | window BITS | unbound        a further key for the memory: "addr rkey"
//   fill                       other bytes than any packet has
//   post write|read|atomic ADDR RKEY                           a request of ours to the peer
//   look                       "state written completion-statuses…"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REGION = 8192, FILL = 0xC5, ALL = 0xF | IBV_ACCESS_MW_BIND, QKEY = 0x11111111, KEYS = 8 };

static struct ibv_context *device;
static struct ibv_pd *pd, *other_pd;
static struct ibv_mr *mr, *more[KEYS];
static struct ibv_mw *windows[KEYS];
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static unsigned char *mem;
static int gid_index, keys;
static enum ibv_mtu mtu;
static FILE *commands, *peer; // two streams on one connection

static void say_failed(const char *what)
{
    fprintf(peer, "failed %s\n", what);
}

static void clear(void)
{
    // A window that is bound on a QP keeps rxe from destroying it.
    for (int i = 0; i < keys; i++) {
        if (windows[i])
            ibv_dealloc_mw(windows[i]);
        if (more[i])
            ibv_dereg_mr(more[i]);
    }
    if (qp)
        ibv_destroy_qp(qp);
    if (cq)
        ibv_destroy_cq(cq);
    keys = 0;
    qp = NULL;
    cq = NULL;
}

static bool to_init(enum ibv_qp_type type, unsigned rights)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = rights, .qkey = QKEY};

    return !ibv_modify_qp(qp, &attr,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                              (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

static bool to_rtr(enum ibv_qp_type type, unsigned depth, unsigned psn, unsigned peer_qpn, const union ibv_gid *gid)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu,
        .dest_qp_num = peer_qpn,
        .rq_psn = psn,
        .max_dest_rd_atomic = (uint8_t)depth,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.dgid = *gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64}},
    };
    int mask = IBV_QP_STATE;

    if (type != IBV_QPT_UD)
        mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (type == IBV_QPT_RC)
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    return !ibv_modify_qp(qp, &attr, mask);
}

static bool to_rts(enum ibv_qp_type type, unsigned psn)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS,
                               .timeout = 0, // never: what it sends again, it sends for an answer
                               .retry_cnt = 6,
                               .rnr_retry = 6,
                               .sq_psn = psn,
                               .max_rd_atomic = 16};
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

    if (type == IBV_QPT_RC)
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    return !ibv_modify_qp(qp, &attr, mask);
}

static bool to_plain(enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};

    return !ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

static void new_qp(const char *arguments)
{
    char type_name[8], state[8], gid_text[64];
    unsigned depth, rights, receives, psn, peer_qpn;
    int bytes;
    union ibv_gid gid;

    if (sscanf(arguments, "%7s %u %u %u %d %7s %u %u %63s", type_name, &depth, &rights, &receives, &bytes, state, &psn,
               &peer_qpn, gid_text) != 9 ||
        inet_pton(AF_INET6, gid_text, &gid) != 1)
        return say_failed("new");
    clear();
    enum ibv_qp_type type = !strcmp(type_name, "rc") ? IBV_QPT_RC : !strcmp(type_name, "uc") ? IBV_QPT_UC : IBV_QPT_UD;
    cq = ibv_create_cq(device, 128, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .qp_type = type,
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
        .sq_sig_all = 1};
    qp = cq ? ibv_create_qp(pd, &init) : NULL;
    if (!qp)
        return say_failed("create_qp");
    // One of reset, init, rtr, rts: each goes through those before it; err through all.
    int steps = !strcmp(state, "reset") ? 0 : !strcmp(state, "init") ? 1 : !strcmp(state, "rtr") ? 2 : 3;
    if (steps > 0 && !to_init(type, rights))
        return say_failed("init");
    for (unsigned i = 0; steps > 0 && i < receives; i++) {
        uint32_t length = (uint32_t)abs(bytes);
        struct ibv_sge sge = {(uintptr_t)mem, length, bytes < 0 ? mr->lkey ^ 0x100 : mr->lkey};
        struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
        if (ibv_post_recv(qp, &wr, &bad))
            return say_failed("post_recv");
    }
    if (steps > 1 && !to_rtr(type, depth, psn, peer_qpn, &gid))
        return say_failed("rtr");
    if (steps > 2 && !to_rts(type, psn))
        return say_failed("rts");
    if (!strcmp(state, "err") && !to_plain(IBV_QPS_ERR))
        return say_failed("err");
    fprintf(peer, "%u %llu %u\n", qp->qp_num, (unsigned long long)(uintptr_t)mem, mr->rkey);
}

static uint32_t bound_window(unsigned rights)
{
    struct ibv_mw *mw = windows[keys++] = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;

    if (!mw)
        return 0;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = mr, .addr = (uintptr_t)mem, .length = REGION, .mw_access_flags = rights};
    if (ibv_post_send(qp, &wr, &bad))
        return 0;
    for (int i = 0; i < 100000; i++)
        if (ibv_poll_cq(cq, 1, &wc) > 0)
            return wc.status ? 0 : wr.bind_mw.rkey;
    return 0;
}

static void new_key(const char *arguments)
{
    unsigned bits = 0;
    uint32_t rkey = 0;

    if (keys == KEYS)
        return say_failed("too many keys");
    more[keys] = NULL;
    windows[keys] = NULL;
    if (sscanf(arguments, "rights %u", &bits) == 1) {
        struct ibv_mr *m = more[keys++] = ibv_reg_mr(pd, mem, REGION, (int)bits);
        rkey = m ? m->rkey : 0;
    } else if (!strncmp(arguments, "pd", 2)) {
        struct ibv_mr *m = more[keys++] = ibv_reg_mr(other_pd, mem, REGION, ALL);
        rkey = m ? m->rkey : 0;
    } else if (!strncmp(arguments, "gone", 4)) {
        struct ibv_mr *m = ibv_reg_mr(pd, mem, REGION, ALL);
        rkey = m ? m->rkey : 0;
        if (m)
            ibv_dereg_mr(m);
    } else if (sscanf(arguments, "window %u", &bits) == 1) {
        rkey = bound_window(bits);
    } else if (!strncmp(arguments, "unbound", 7)) {
        struct ibv_mw *mw = windows[keys++] = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
        rkey = mw ? mw->rkey : 0;
    }
    if (!rkey)
        return say_failed("key");
    fprintf(peer, "%llu %u\n", (unsigned long long)(uintptr_t)mem, rkey);
}

static void post(const char *arguments)
{
    char what[8];
    unsigned long long addr;
    unsigned rkey;
    struct ibv_sge sge = {(uintptr_t)mem, 8, mr->lkey};
    struct ibv_send_wr wr = {.send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1}, *bad;

    if (sscanf(arguments, "%7s %llu %u", what, &addr, &rkey) != 3)
        return say_failed("post");
    wr.opcode = !strcmp(what, "atomic") ? IBV_WR_ATOMIC_FETCH_AND_ADD
                : !strcmp(what, "write") ? IBV_WR_RDMA_WRITE
                                         : IBV_WR_RDMA_READ;
    if (!strcmp(what, "atomic")) {
        wr.wr.atomic.remote_addr = addr;
        wr.wr.atomic.rkey = rkey;
        wr.wr.atomic.compare_add = 1;
    } else {
        wr.wr.rdma.remote_addr = addr;
        wr.wr.rdma.rkey = rkey;
    }
    if (!strcmp(what, "read"))
        sge.length = 600;
    if (ibv_post_send(qp, &wr, &bad))
        return say_failed("post_send");
    fprintf(peer, "posted\n");
}

static void look(void)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    struct ibv_wc wc;
    bool written = false;

    if (!qp || ibv_query_qp(qp, &attr, IBV_QP_STATE, &init))
        return say_failed("query_qp");
    for (int i = 0; i < REGION; i++)
        written |= mem[i] != FILL;
    fprintf(peer, "%d %d", (int)attr.qp_state, written);
    while (ibv_poll_cq(cq, 1, &wc) > 0)
        fprintf(peer, " %d", (int)wc.status);
    fprintf(peer, "\n");
}

static bool open_device(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    device = list && *list ? ibv_open_device(*list) : NULL;
    pd = device ? ibv_alloc_pd(device) : NULL;
    other_pd = device ? ibv_alloc_pd(device) : NULL;
    mem = aligned_alloc(4096, REGION);
    if (!pd || !other_pd || !mem)
        return false;
    memset(mem, FILL, REGION);
    mr = ibv_reg_mr(pd, mem, REGION, ALL | 1 << 8); // FLUSH, where the kernel knows it
    if (!mr)
        mr = ibv_reg_mr(pd, mem, REGION, ALL);
    return mr != NULL;
}

static bool meet(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(s, (struct sockaddr *)&at, sizeof at) || listen(s, 1))
        return false;
    int c = accept(s, NULL, NULL);
    commands = fdopen(c, "r");
    peer = fdopen(dup(c), "w");
    return commands && peer;
}

int main(int argc, char **argv)
{
    char line[256];

    if (argc != 4 || !open_device())
        return 2;
    gid_index = atoi(argv[2]);
    mtu = atoi(argv[3]) == 256 ? IBV_MTU_256 : IBV_MTU_1024;
    if (!meet(atoi(argv[1])))
        return 2;
    while (fgets(line, sizeof line, commands)) {
        if (!strncmp(line, "new ", 4))
            new_qp(line + 4);
        else if (!strncmp(line, "key ", 4))
            new_key(line + 4);
        else if (!strncmp(line, "post ", 5))
            post(line + 5);
        else if (!strncmp(line, "fill", 4)) {
            memset(mem, FILL, REGION);
            fprintf(peer, "filled\n");
        } else if (!strncmp(line, "look", 4))
            look();
        else
            say_failed("command");
        fflush(peer);
    }
    clear();
    return 0;
}
