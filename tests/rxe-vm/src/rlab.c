// rlab: one small RC test program with known payloads, for captures and interop runs.
//   rlab server MODE [-p port] [-6] [-a addr]           rdma_cm listener
//   rlab client MODE [-p port] -a addr [-s src]         rdma_cm connector
//   rlab tserver MODE -g gididx [-P psn] [-M mtu]       QP data exchanged over TCP (no CM), explicit PSN
//   rlab tclient MODE -a addr -g gididx [-P psn] [-M mtu]
// MODES (same on both sides)
//   basic        SEND, SEND_IMM, WRITE (5000 B), WRITE_IMM, READ (5000 B), CAS, FADD, 0-byte WRITE, SEND back
//   inv          server binds a type-2 memory window and SENDs its rkey; client WRITEs with it, then
//   SEND_WITH_INV,
//                then WRITEs again                -> NAK Remote Access Error
//   badrkey      WRITE with a wrong rkey            -> NAK Remote Access Error (syndrome 0x62)
//   badread      READ with a wrong rkey             -> NAK Remote Access Error
//   badatomic    FADD with a wrong rkey             -> NAK Remote Access Error
//   unaligned    FADD at address+4                  -> rxe refuses it at post_send (EOPNOTSUPP): nothing on
//   the wire oob          WRITE past the end of the MR       -> NAK Remote Access Error toolong      SEND
//   longer than the posted recv   -> rxe: NAK Remote Operational Error (0x63) rnr          the receiver posts
//   its recv 200 ms late -> RNR NAK, then success rnrfail      never posted, rnr_retry=2          -> RNR
//   NAKs, IBV_WC_RNR_RETRY_EXC_ERR reject       the server rejects with private data "rlab-reject" many 64
//   SENDs of 600 B with a 4-deep window (for loss tests)
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BUF 65536
struct info {
    uint64_t addr;
    uint32_t rkey;
    uint32_t magic;
} __attribute__((packed));
static const char CPD[] = "rlab-client-private-data", SPD[] = "rlab-server-private-data";
static char *mode = "basic", *addr, *src, *port = "18515";
static int v6, gidx = 1, mtu = 1024;
static uint32_t psn = 0;
static char *buf;
static struct ibv_mr *mr;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct info rem;
#define DIE(x)                                                                                               \
    do {                                                                                                     \
        fprintf(stderr, "FAIL %s: %s\n", x, strerror(errno));                                                \
        exit(1);                                                                                             \
    } while (0)
static int is(const char *m)
{
    return !strcmp(mode, m);
}

static void mk(struct ibv_context *c)
{
    buf = aligned_alloc(4096, BUF);
    memset(buf, 0, BUF);
    pd = ibv_alloc_pd(c);
    cq = ibv_create_cq(c, 256, NULL, NULL, 0);
    mr = ibv_reg_mr(pd, buf, BUF,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND);
    if (!pd || !cq || !mr)
        DIE("pd/cq/mr");
}
static struct ibv_qp_init_attr qia(void)
{
    struct ibv_qp_init_attr a = {
        .send_cq = cq,
        .recv_cq = cq,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = {.max_send_wr = 128, .max_recv_wr = 128, .max_send_sge = 1, .max_recv_sge = 1}};
    return a;
}
static void recv_post(uint64_t off, uint32_t len)
{
    struct ibv_sge s = {(uintptr_t)buf + off, len, mr->lkey};
    struct ibv_recv_wr w = {.wr_id = 100 + off, .sg_list = &s, .num_sge = 1}, *b;
    if (ibv_post_recv(qp, &w, &b))
        DIE("post_recv");
}
static struct ibv_wc wait_wc(const char *what)
{
    struct ibv_wc wc;
    int n;
    while (!(n = ibv_poll_cq(cq, 1, &wc)))
        usleep(50);
    if (n < 0)
        DIE("poll");
    printf("%s: status=%s(%d) opcode=%d byte_len=%u imm=0x%08x flags=%u\n", what,
           ibv_wc_status_str(wc.status), wc.status, wc.status ? -1 : wc.opcode, wc.status ? 0 : wc.byte_len,
           (wc.wc_flags & IBV_WC_WITH_IMM) && !wc.status ? ntohl(wc.imm_data) : 0,
           wc.status ? 0 : wc.wc_flags);
    fflush(stdout);
    return wc;
}
static struct ibv_wc op(const char *what, enum ibv_wr_opcode o, uint64_t loff, uint32_t len, uint64_t roff,
                        uint32_t rkey, uint32_t imm, uint64_t cmp, uint64_t swp)
{
    struct ibv_sge s = {(uintptr_t)buf + loff, len, mr->lkey};
    struct ibv_send_wr w = {.wr_id = 1,
                            .sg_list = &s,
                            .num_sge = len ? 1 : 0,
                            .opcode = o,
                            .send_flags = IBV_SEND_SIGNALED,
                            .imm_data = htonl(imm)},
                       *b;
    if (o == IBV_WR_ATOMIC_CMP_AND_SWP || o == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        w.wr.atomic.remote_addr = rem.addr + roff;
        w.wr.atomic.rkey = rkey;
        w.wr.atomic.compare_add = cmp;
        w.wr.atomic.swap = swp;
    } else {
        w.wr.rdma.remote_addr = rem.addr + roff;
        w.wr.rdma.rkey = rkey;
    }
    if (ibv_post_send(qp, &w, &b))
        DIE("post_send");
    return wait_wc(what);
}
static void fill(char *p, int n, int seed)
{
    for (int i = 0; i < n; i++)
        p[i] = (i * 7 + seed) & 0xff;
}

static void before(int server)
{ // receives that must be there before the connection
    if (!server) {
        if (is("basic") || is("inv"))
            recv_post(60000, 64);
        return;
    }
    if (is("basic")) {
        for (int i = 0; i < 3; i++)
            recv_post(i * 512, 512);
    } else if (is("toolong"))
        recv_post(0, 16);
    else if (is("inv"))
        recv_post(0, 64);
    else if (is("many"))
        for (int i = 0; i < 64; i++)
            recv_post(0, 4000);
    if (is("basic"))
        *(uint64_t *)(buf + 32768) = 0x1122334455667788ull;
}
static void client_run(void)
{
    uint32_t rk = rem.rkey;
    if (is("basic")) {
        strcpy(buf + 1000, "hello rxe");
        op("SEND 10B", IBV_WR_SEND, 1000, 10, 0, 0, 0, 0, 0);
        fill(buf + 1000, 100, 1);
        op("SEND_IMM 100B", IBV_WR_SEND_WITH_IMM, 1000, 100, 0, 0, 0xdeadbeef, 0, 0);
        fill(buf + 8192, 5000, 2);
        op("WRITE 5000B", IBV_WR_RDMA_WRITE, 8192, 5000, 8192, rk, 0, 0, 0);
        fill(buf + 1000, 33, 3);
        op("WRITE_IMM 33B", IBV_WR_RDMA_WRITE_WITH_IMM, 1000, 33, 16384, rk, 0xcafef00d, 0, 0);
        op("READ 5000B", IBV_WR_RDMA_READ, 40000, 5000, 8192, rk, 0, 0, 0);
        printf("read-back %s\n", memcmp(buf + 40000, buf + 8192, 5000) ? "DIFFERS" : "same");
        op("CAS", IBV_WR_ATOMIC_CMP_AND_SWP, 2000, 8, 32768, rk, 0, 0x1122334455667788ull,
           0xaabbccddeeff0011ull);
        printf("CAS old %016llx\n", (unsigned long long)*(uint64_t *)(buf + 2000));
        op("FADD", IBV_WR_ATOMIC_FETCH_AND_ADD, 2000, 8, 32768, rk, 0, 0x10, 0);
        printf("FADD old %016llx\n", (unsigned long long)*(uint64_t *)(buf + 2000));
        op("WRITE 0B", IBV_WR_RDMA_WRITE, 0, 0, 8192, rk, 0, 0, 0);
        op("READ 0B", IBV_WR_RDMA_READ, 0, 0, 8192, rk, 0, 0, 0);
        op("SEND 3B", IBV_WR_SEND, 1000, 3, 0, 0, 0, 0, 0);
        wait_wc("RECV from server");
        printf("got '%s'\n", buf + 60000);
    } else if (is("inv")) {
        wait_wc("RECV mw rkey");
        uint32_t k;
        memcpy(&k, buf + 60000, 4);
        k = ntohl(k);
        printf("mw rkey 0x%08x\n", k);
        op("WRITE via mw", IBV_WR_RDMA_WRITE, 0, 64, 4096, k, 0, 0, 0);
        struct ibv_sge sg = {(uintptr_t)buf, 20, mr->lkey};
        struct ibv_send_wr w = {.sg_list = &sg,
                                .num_sge = 1,
                                .opcode = IBV_WR_SEND_WITH_INV,
                                .send_flags = IBV_SEND_SIGNALED,
                                .invalidate_rkey = k},
                           *b;
        if (ibv_post_send(qp, &w, &b))
            DIE("post inv");
        wait_wc("SEND_WITH_INV 20B");
        usleep(50000);
        op("WRITE via invalidated mw", IBV_WR_RDMA_WRITE, 0, 64, 4096, k, 0, 0, 0);
    } else if (is("badrkey"))
        op("WRITE bad rkey", IBV_WR_RDMA_WRITE, 0, 64, 0, rk ^ 0x55, 0, 0, 0);
    else if (is("badread"))
        op("READ bad rkey", IBV_WR_RDMA_READ, 0, 64, 0, rk ^ 0x55, 0, 0, 0);
    else if (is("badatomic"))
        op("FADD bad rkey", IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, 0, rk ^ 0x55, 0, 1, 0);
    else if (is("unaligned"))
        op("FADD unaligned", IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, 4, rk, 0, 1, 0);
    else if (is("oob"))
        op("WRITE out of bounds", IBV_WR_RDMA_WRITE, 0, 64, BUF - 32, rk, 0, 0, 0);
    else if (is("toolong"))
        op("SEND 64B into 16B", IBV_WR_SEND, 0, 64, 0, 0, 0, 0, 0);
    else if (is("rnr")) {
        strcpy(buf, "late");
        op("SEND (rnr)", IBV_WR_SEND, 0, 5, 0, 0, 0, 0, 0);
    } else if (is("rnrfail"))
        op("SEND (rnrfail)", IBV_WR_SEND, 0, 5, 0, 0, 0, 0, 0);
    else if (is("many")) {
        int posted = 0, done = 0;
        struct ibv_wc wc;
        while (done < 64) {
            while (posted < 64 && posted - done < 4) {
                struct ibv_sge s = {(uintptr_t)buf + posted * 8, 600, mr->lkey};
                struct ibv_send_wr w = {.sg_list = &s,
                                        .num_sge = 1,
                                        .opcode = IBV_WR_SEND,
                                        .send_flags = IBV_SEND_SIGNALED},
                                   *b;
                if (ibv_post_send(qp, &w, &b))
                    DIE("post");
                posted++;
            }
            int n = ibv_poll_cq(cq, 1, &wc);
            if (n > 0) {
                if (wc.status) {
                    printf("many: %s after %d\n", ibv_wc_status_str(wc.status), done);
                    return;
                }
                done++;
            } else
                usleep(20);
        }
        printf("many: 64 sends done\n");
    }
}
static void server_run(void)
{
    if (is("basic")) {
        wait_wc("RECV1");
        printf("got '%s'\n", buf);
        wait_wc("RECV2");
        wait_wc("RECV3 (write imm)");
        recv_post(0, 512);
        wait_wc("RECV4");
        printf("atomic word now %016llx\n", (unsigned long long)*(uint64_t *)(buf + 32768));
        strcpy(buf + 50000, "bye from server");
        op("SEND back 16B", IBV_WR_SEND, 50000, 16, 0, 0, 0, 0, 0);
    } else if (is("inv")) {
        struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
        if (!mw)
            DIE("alloc_mw");
        uint32_t k = ibv_inc_rkey(mw->rkey);
        struct ibv_send_wr w = {.opcode = IBV_WR_BIND_MW,
                                .send_flags = IBV_SEND_SIGNALED,
                                .bind_mw = {.mw = mw,
                                            .rkey = k,
                                            .bind_info = {.mr = mr,
                                                          .addr = (uintptr_t)buf + 4096,
                                                          .length = 4096,
                                                          .mw_access_flags = IBV_ACCESS_REMOTE_WRITE |
                                                                             IBV_ACCESS_REMOTE_READ}}},
                           *b;
        if (ibv_post_send(qp, &w, &b))
            DIE("bind_mw");
        wait_wc("BIND_MW");
        uint32_t n = htonl(k);
        memcpy(buf + 50000, &n, 4);
        printf("mw rkey 0x%08x\n", k);
        op("SEND mw rkey", IBV_WR_SEND, 50000, 4, 0, 0, 0, 0, 0);
        wait_wc("RECV (inv)");
    } else if (is("rnr")) {
        usleep(200000);
        recv_post(0, 64);
        wait_wc("RECV late");
    } else if (is("many"))
        for (int i = 0; i < 64; i++) {
            struct ibv_wc w;
            int n;
            while (!(n = ibv_poll_cq(cq, 1, &w)))
                usleep(20);
            if (w.status) {
                printf("many recv %s at %d\n", ibv_wc_status_str(w.status), i);
                return;
            }
        }
    fflush(stdout);
}
static struct rdma_cm_event *ev(struct rdma_event_channel *ch, int want)
{
    struct rdma_cm_event *e;
    if (rdma_get_cm_event(ch, &e))
        DIE("get_cm_event");
    printf("event %s status %d pdlen %u", rdma_event_str(e->event), e->status,
           e->param.conn.private_data_len);
    if (e->param.conn.private_data_len)
        printf(" pd '%.24s'", (char *)e->param.conn.private_data);
    printf("\n");
    fflush(stdout);
    if (want >= 0 && (int)e->event != want)
        exit(3);
    return e;
}
static void cm_main(int server)
{
    struct rdma_event_channel *ch = rdma_create_event_channel();
    struct rdma_cm_id *id;
    struct rdma_cm_event *e;
    struct addrinfo h = {.ai_socktype = SOCK_STREAM,
                         .ai_flags = server ? AI_PASSIVE : 0,
                         .ai_family = v6 ? AF_INET6 : 0},
                    *ai;
    if (!ch || rdma_create_id(ch, &id, NULL, RDMA_PS_TCP))
        DIE("create_id");
    if (getaddrinfo(addr ? addr : (v6 ? "::" : "0.0.0.0"), port, &h, &ai))
        DIE("getaddrinfo");
    struct ibv_qp_init_attr a;
    char pdat[56];
    memset(pdat, 0, sizeof pdat);
    struct rdma_conn_param cp = {.private_data = pdat,
                                 .private_data_len = sizeof pdat,
                                 .responder_resources = 4,
                                 .initiator_depth = 4,
                                 .retry_count = 7,
                                 .rnr_retry_count = is("rnrfail") ? 2 : 7};
    if (server) {
        if (rdma_bind_addr(id, ai->ai_addr) || rdma_listen(id, 4))
            DIE("listen");
        printf("listening\n");
        fflush(stdout);
        e = ev(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
        struct rdma_cm_id *c = e->id;
        rdma_ack_cm_event(e);
        if (is("reject")) {
            if (rdma_reject(c, "rlab-reject", 12))
                DIE("reject");
            sleep(1);
            return;
        }
        mk(c->verbs);
        a = qia();
        if (rdma_create_qp(c, pd, &a))
            DIE("create_qp");
        qp = c->qp;
        before(1);
        struct info *i = (struct info *)(pdat + 32);
        strcpy(pdat, SPD);
        i->addr = htobe64((uintptr_t)buf);
        i->rkey = htonl(mr->rkey);
        i->magic = htonl(0x524c4142);
        printf("qpn 0x%06x rkey 0x%08x addr 0x%llx\n", qp->qp_num, mr->rkey,
               (unsigned long long)(uintptr_t)buf);
        fflush(stdout);
        if (is("rnr") || is("rnrfail")) {
        }
        if (rdma_accept(c, &cp))
            DIE("accept");
        rdma_ack_cm_event(ev(ch, RDMA_CM_EVENT_ESTABLISHED));
        if (is("rnr") || is("rnrfail")) {
            struct ibv_qp_attr q = {.min_rnr_timer = 22};
            if (ibv_modify_qp(qp, &q, IBV_QP_MIN_RNR_TIMER))
                perror("min_rnr_timer");
        }
        server_run();
        rdma_ack_cm_event(ev(ch, RDMA_CM_EVENT_DISCONNECTED));
        rdma_disconnect(c);
        rdma_destroy_qp(c);
        rdma_destroy_id(c);
    } else {
        struct sockaddr_storage ss, *sp = NULL;
        if (src) {
            struct addrinfo *sa;
            getaddrinfo(src, NULL, &h, &sa);
            memcpy(&ss, sa->ai_addr, sa->ai_addrlen);
            sp = &ss;
        }
        if (rdma_resolve_addr(id, (void *)sp, ai->ai_addr, 2000))
            DIE("resolve_addr");
        rdma_ack_cm_event(ev(ch, RDMA_CM_EVENT_ADDR_RESOLVED));
        if (rdma_resolve_route(id, 2000))
            DIE("resolve_route");
        rdma_ack_cm_event(ev(ch, RDMA_CM_EVENT_ROUTE_RESOLVED));
        mk(id->verbs);
        a = qia();
        if (rdma_create_qp(id, pd, &a))
            DIE("create_qp");
        qp = id->qp;
        before(0);
        printf("qpn 0x%06x\n", qp->qp_num);
        strcpy(pdat, CPD);
        if (rdma_connect(id, &cp))
            DIE("connect");
        e = ev(ch, -1);
        if (e->event != RDMA_CM_EVENT_ESTABLISHED) {
            printf("not connected (event %s, status %d)\n", rdma_event_str(e->event), e->status);
            rdma_ack_cm_event(e);
            return;
        }
        struct info i;
        memcpy(&i, (char *)e->param.conn.private_data + 32, sizeof i);
        rdma_ack_cm_event(e);
        rem.addr = be64toh(i.addr);
        rem.rkey = ntohl(i.rkey);
        printf("remote addr 0x%llx rkey 0x%08x\n", (unsigned long long)rem.addr, rem.rkey);
        if (is("rnr") || is("rnrfail"))
            usleep(50000);
        client_run();
        usleep(100000);
        rdma_disconnect(id);
        rdma_ack_cm_event(ev(ch, RDMA_CM_EVENT_DISCONNECTED));
        rdma_destroy_qp(id);
        rdma_destroy_id(id);
    }
}
#include <sys/socket.h>
struct tinfo {
    uint32_t qpn, psn, rkey;
    uint64_t addr;
    union ibv_gid gid;
} __attribute__((packed));
static void t_main(int server)
{
    int n;
    struct ibv_device **l = ibv_get_device_list(&n);
    if (!n)
        DIE("no device");
    struct ibv_context *c = ibv_open_device(l[0]);
    mk(c);
    struct ibv_qp_init_attr a = qia();
    qp = ibv_create_qp(pd, &a);
    if (!qp)
        DIE("create_qp");
    struct ibv_qp_attr q = {.qp_state = IBV_QPS_INIT,
                            .port_num = 1,
                            .qp_access_flags =
                                IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
    if (ibv_modify_qp(qp, &q, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        DIE("INIT");
    before(server);
    struct tinfo me = {htonl(qp->qp_num), htonl(psn), htonl(mr->rkey), htobe64((uintptr_t)buf)}, ot;
    ibv_query_gid(c, 1, gidx, &me.gid);
    struct addrinfo h = {.ai_socktype = SOCK_STREAM, .ai_flags = server ? AI_PASSIVE : 0}, *ai;
    if (getaddrinfo(addr, port, &h, &ai))
        DIE("gai");
    int s = socket(ai->ai_family, SOCK_STREAM, 0), one = 1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (server) {
        if (bind(s, ai->ai_addr, ai->ai_addrlen) || listen(s, 1))
            DIE("bind");
        printf("listening\n");
        fflush(stdout);
        s = accept(s, 0, 0);
    } else if (connect(s, ai->ai_addr, ai->ai_addrlen))
        DIE("connect");
    if (write(s, &me, sizeof me) != sizeof me || recv(s, &ot, sizeof ot, MSG_WAITALL) != sizeof ot)
        DIE("exchange");
    rem.addr = be64toh(ot.addr);
    rem.rkey = ntohl(ot.rkey);
    printf("local qpn 0x%06x psn 0x%06x rkey 0x%08x addr 0x%llx; remote qpn 0x%06x psn 0x%06x rkey 0x%08x\n",
           qp->qp_num, psn, mr->rkey, (unsigned long long)(uintptr_t)buf, ntohl(ot.qpn), ntohl(ot.psn),
           rem.rkey);
    struct ibv_qp_attr r = {.qp_state = IBV_QPS_RTR,
                            .path_mtu = mtu == 256    ? 1
                                        : mtu == 512  ? 2
                                        : mtu == 1024 ? 3
                                        : mtu == 2048 ? 4
                                                      : 5,
                            .dest_qp_num = ntohl(ot.qpn),
                            .rq_psn = ntohl(ot.psn),
                            .max_dest_rd_atomic = 4,
                            .min_rnr_timer = 22,
                            .ah_attr = {.is_global = 1,
                                        .port_num = 1,
                                        .grh = {.dgid = ot.gid, .sgid_index = gidx, .hop_limit = 64}}};
    if (ibv_modify_qp(qp, &r,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        DIE("RTR");
    struct ibv_qp_attr t = {.qp_state = IBV_QPS_RTS,
                            .timeout = 14,
                            .retry_cnt = 7,
                            .rnr_retry = is("rnrfail") ? 2 : 7,
                            .sq_psn = psn,
                            .max_rd_atomic = 4};
    if (ibv_modify_qp(qp, &t,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        DIE("RTS");
    char x = 0;
    if (write(s, &x, 1) != 1 || read(s, &x, 1) != 1)
        DIE("sync");
    if (server)
        server_run();
    else
        client_run();
    if (write(s, &x, 1) != 1 || read(s, &x, 1) != 1) {
    }
    usleep(50000);
}
int main(int ac, char **av)
{
    if (ac < 3) {
        fprintf(stderr, "usage: rlab server|client|tserver|tclient MODE ...\n");
        return 2;
    }
    char *role = av[1];
    mode = av[2];
    int o;
    optind = 3;
    while ((o = getopt(ac, av, "p:a:s:6g:P:M:")) > 0)
        switch (o) {
        case 'p':
            port = optarg;
            break;
        case 'a':
            addr = optarg;
            break;
        case 's':
            src = optarg;
            break;
        case '6':
            v6 = 1;
            break;
        case 'g':
            gidx = atoi(optarg);
            break;
        case 'P':
            psn = strtoul(optarg, 0, 0);
            break;
        case 'M':
            mtu = atoi(optarg);
            break;
        }
    alarm(60);
    if (role[0] == 't')
        t_main(!strcmp(role, "tserver"));
    else
        cm_main(!strcmp(role, "server"));
    printf("done\n");
    return 0;
}
