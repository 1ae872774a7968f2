//! Tests of the shared host over UDP sockets on the loopback.

use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::device::loopback::Switch;
use crate::device::sys::poll::{Watch, wait};
use crate::device::{pin_current_thread, thread_cpu_time};
use crate::engine::testing::{Side, engine};
use crate::verbs::{Operation, QpTransition, Remote, WcOpcode, WcStatus};

const SECOND: Duration = Duration::from_secs(1);
const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));

fn host() -> Host {
    Host::new(engine())
}

fn pair(a: &mut Handle, b: &mut Handle, len: usize) -> (Side, Side) {
    let (left, right) = (Side::new(a, len), Side::new(b, len));
    left.connect(a, &right);
    right.connect(b, &left);
    (left, right)
}

fn wait_one(side: &Side, verbs: &mut Handle) -> WorkCompletion {
    loop {
        assert!(verbs.wait_cq(side.cq, PATIENCE).unwrap(), "nothing completed");
        if let Some(wc) = side.completed(verbs) {
            return wc;
        }
    }
}

#[test]
fn a_group_that_the_device_cannot_join_is_an_answer_and_not_an_event() {
    let host = host();
    let mut verbs = host.handle();
    let side = Side::new(&mut verbs, 64);
    let caps = crate::verbs::QpCapabilities::default();
    let qp_type = crate::verbs::QpType::Ud;
    let pd = verbs.alloc_pd().unwrap();
    let (send_cq, recv_cq) = (side.cq, side.cq);
    let init = QpInit { pd, qp_type, send_cq, recv_cq, srq: None, caps, signal_all: false, qpn: None };
    let ud = verbs.create_qp(init).unwrap();
    // An IPv6 group on a socket of IPv4.
    let group = |text: &str| Gid::from(text.parse::<std::net::IpAddr>().unwrap());
    assert_eq!(verbs.attach_multicast(ud, group("ff0e::1")), Err(VerbsError::JoinRefused));
    assert_eq!(verbs.detach_multicast(ud, group("ff0e::1")), Err(VerbsError::NotMulticast), "nothing was attached");
    verbs.attach_multicast(ud, group("239.7.7.7")).unwrap();
    verbs.detach_multicast(ud, group("239.7.7.7")).unwrap();
    assert_eq!(verbs.poll_event(), None);
}

#[test]
fn threads_share_two_engines_and_every_message_arrives_once() {
    const THREADS: u8 = 4;
    const ROUNDS: u64 = 200;
    let (a, b) = (host(), host());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (mut va, mut vb) = (a.handle(), b.handle());
            let (left, right) = pair(&mut va, &mut vb, 3000);
            // One thread at each end: a ping, and a pong that echoes it.
            let (ping, pong) = (left.clone(), right.clone());
            pong.post_recv(&mut vb, 0);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let body = [thread ^ (round as u8); 3000];
                    ping.region.write(0, &body).unwrap();
                    ping.post_recv(&mut va, round);
                    ping.post(&mut va, round, Operation::Send);
                    let (one, two) = (wait_one(&ping, &mut va), wait_one(&ping, &mut va));
                    assert_eq!((one.wr_id, two.wr_id), (round, round));
                    // The echo is the complement of what was sent.
                    assert_eq!(ping.region.to_vec(), body.map(|b| !b));
                }
            });
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let got = wait_one(&pong, &mut vb);
                    assert_eq!((got.wr_id, got.byte_len), (round, 3000));
                    let echo: Vec<u8> = pong.region.to_vec().iter().map(|b| !b).collect();
                    pong.region.write(0, &echo).unwrap();
                    pong.post(&mut vb, round, Operation::Send);
                    assert_eq!(wait_one(&pong, &mut vb).wr_id, round);
                    pong.post_recv(&mut vb, round + 1);
                }
            });
        }
    });
}

#[test]
fn two_threads_may_share_one_qp_and_one_cq() {
    const EACH: u64 = 300;
    let (a, b) = (host(), host());
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    let stop = &AtomicBool::new(false);
    let sent: u64 = std::thread::scope(|scope| {
        // The peer of one-sided operations: nobody there calls a verb.
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if vb.drive() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let workers: Vec<_> = (0..2u64)
            .map(|worker| {
                let (mut verbs, left, to) = (va.clone(), &left, right.remote());
                scope.spawn(move || {
                    let mut seen = 0u64;
                    for i in 0..EACH {
                        left.post(&mut verbs, worker * EACH + i, Operation::Write(to));
                        while left.completed(&mut verbs).is_none() {}
                        seen += 1;
                    }
                    seen
                })
            })
            .collect();
        let seen = workers.into_iter().map(|w| w.join().unwrap()).sum();
        stop.store(true, Ordering::Relaxed);
        seen
    });
    assert_eq!(sent, 2 * EACH);
    assert!(left.completed(&mut va).is_none());
}

#[test]
fn a_window_is_bound_moved_and_closed_through_a_handle() {
    let (a, b) = (host(), host());
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    let window = vb.alloc_mw(right.pd, MwType::One).unwrap();
    let (mr, addr, access) = (Some(right.mr.handle), right.mr.iova, AccessFlags::REMOTE_WRITE);
    let here = MwBind { mw: window.handle, rkey: window.rkey, mr, addr, length: 64, access };
    let nowhere = MwBind { mr: None, length: 0, ..here };
    left.region.write(0, b"through a window").unwrap();
    let mut keys = Vec::new();
    for (wr_id, bind) in [(1, here), (2, MwBind { addr: addr + 32, length: 32, ..here }), (3, nowhere)] {
        keys.push(vb.bind_mw(right.qp, wr_id, bind, SendFlags::SIGNALED).unwrap());
        let bound = wait_one(&right, &mut vb);
        assert_eq!((bound.wr_id, bound.opcode, bound.status), (wr_id, WcOpcode::BindMw, WcStatus::Success));
        if wr_id == 1 {
            left.post(&mut va, 1, Operation::Write(Remote { addr, rkey: keys[0] }));
            while left.completed(&mut va).is_none_or(|wc| wc.status != WcStatus::Success) {
                vb.drive();
            }
            assert_eq!(&right.region.to_vec()[..16], b"through a window");
        }
    }
    keys.dedup();
    assert_eq!(keys.len(), 3, "each bind has a key of its own");
    vb.deregister(right.mr.handle).unwrap();
    vb.dealloc_mw(window.handle).unwrap();
    assert_eq!(vb.bind_mw(right.qp, 4, nowhere, SendFlags::SIGNALED), Err(PostError::InvalidHandle));
}

/// Two hosts on the in-process switch.
fn switched() -> (Host, Host) {
    let switch = Switch::new();
    let [a, b] = [1, 2].map(|n| switch.port(&[core::net::IpAddr::from([10, 0, 0, n])]));
    (Host::new(Engine::open(a).unwrap()), Host::new(Engine::open(b).unwrap()))
}

#[test]
fn an_idle_endpoint_uses_less_than_a_hundredth_of_a_processor() {
    let adaptive = PollPolicy::default();
    std::thread::scope(|scope| {
        for (policy, (a, b)) in [PollPolicy::Block, adaptive]
            .into_iter()
            .flat_map(|policy| [(policy, (host(), host())), (policy, switched())])
        {
            scope.spawn(move || {
                let (mut va, mut vb) = (a.handle(), b.handle());
                va.set_poll_policy(policy);
                let (left, right) = pair(&mut va, &mut vb, 64);
                right.post_recv(&mut vb, 1);
                left.post(&mut va, 1, Operation::Send);
                wait_one(&right, &mut vb);
                wait_one(&left, &mut va);
                // Connected, and nobody says a word.
                let (clock, before) = (va.now(), thread_cpu_time().unwrap());
                assert!(!va.wait_cq(left.cq, Some(SECOND)).unwrap());
                let (passed, used) = (va.now() - clock, thread_cpu_time().unwrap() - before);
                assert!(passed >= SECOND);
                assert!(used < SECOND / 100, "{policy:?}: {used:?}");
            });
        }
    });
}

#[test]
fn a_burst_on_the_switch_wakes_a_thread_that_sleeps() {
    const ROUNDS: u64 = 50;
    let (a, b) = switched();
    let (mut va, mut vb) = (a.handle(), b.handle());
    va.set_poll_policy(PollPolicy::Block);
    vb.set_poll_policy(PollPolicy::Block);
    let (left, right) = pair(&mut va, &mut vb, 64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                right.post_recv(&mut vb, round);
                assert_eq!(wait_one(&right, &mut vb).wr_id, round);
            }
        });
        for round in 0..ROUNDS {
            // The other side is asleep, mostly; when it has no receive yet, we sleep until the timer.
            std::thread::sleep(Duration::from_micros(200));
            left.post(&mut va, round, Operation::Send);
            assert_eq!(wait_one(&left, &mut va).wr_id, round);
        }
    });
}

/// Two ends on one processor, each of which looks all the time: each must let the other have its turn.
#[test]
fn two_spinning_threads_share_one_processor() {
    const ROUNDS: u64 = 500;
    let cpu = crate::device::allowed_cpus().unwrap().iter().next().unwrap();
    let (a, b) = switched();
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    let play = |side: &Side, verbs: &mut Handle, serves: bool| {
        pin_current_thread(cpu).unwrap();
        verbs.set_poll_policy(PollPolicy::Spin);
        let before = thread_cpu_time().unwrap();
        for round in 0..ROUNDS {
            if serves {
                side.post(verbs, round, Operation::Send);
                // Its own completion, and the answer.
                wait_one(side, verbs);
            }
            wait_one(side, verbs);
            side.post_recv(verbs, round);
            if !serves {
                side.post(verbs, round, Operation::Send);
                wait_one(side, verbs);
            }
        }
        thread_cpu_time().unwrap() - before
    };
    left.post_recv(&mut va, 0);
    right.post_recv(&mut vb, 0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| play(&right, &mut vb, false));
        let used = scope.spawn(|| play(&left, &mut va, true)).join().unwrap() + other.join().unwrap();
        // A thread that burns its slice, some milliseconds, before the other may answer would use seconds.
        assert!(used < SECOND, "{used:?}");
    });
}

#[test]
fn the_progress_thread_goes_where_it_is_told_or_does_not_start() {
    let mut a = host();
    let error = a.spawn_progress_on(usize::MAX).unwrap_err();
    assert!(matches!(error, DeviceError::Pin(crate::device::PinError::NotAllowed { .. })), "{error}");
    let cpu = crate::device::allowed_cpus().unwrap().iter().last().unwrap();
    a.spawn_progress_on(cpu).unwrap();
    let mut b = host();
    b.spawn_progress().unwrap();
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    right.post(&mut vb, 1, Operation::Write(left.remote()));
    assert_eq!(wait_one(&right, &mut vb).wr_id, 1, "the pinned thread answers");
}

#[test]
fn a_timer_wakes_a_blocking_wait() {
    let (a, b) = (host(), host());
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, _right) = pair(&mut va, &mut vb, 64);
    drop((vb, b));
    // Nobody answers: the retries run out while the thread sleeps, which takes 8 timeouts of at least 67 ms.
    let before = thread_cpu_time().unwrap();
    left.post(&mut va, 1, Operation::Send);
    assert!(va.wait_cq(left.cq, PATIENCE).unwrap());
    let mut out = [crate::engine::testing::blank(left.qp)];
    assert_eq!(va.poll_cq(left.cq, &mut out).unwrap(), 1);
    assert_eq!((out[0].wr_id, out[0].status), (1, WcStatus::RetryExceeded));
    assert!(thread_cpu_time().unwrap() - before < SECOND / 5);
}

#[test]
fn the_progress_thread_answers_a_peer_while_the_program_computes() {
    let (a, mut b) = (host(), host());
    b.spawn_progress().unwrap();
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 100_000);
    let pattern: Vec<u8> = (0..100_000u32).map(|i| (i % 249) as u8).collect();
    left.region.write(0, &pattern).unwrap();
    // b's program calls nothing from here on.
    left.post(&mut va, 1, Operation::Write(right.remote()));
    assert_eq!(wait_one(&left, &mut va).wr_id, 1);
    assert_eq!(right.region.to_vec(), pattern);
    left.region.write(0, &vec![0; 100_000]).unwrap();
    left.post(&mut va, 2, Operation::Read(right.remote()));
    assert_eq!(wait_one(&left, &mut va).wr_id, 2);
    assert_eq!(left.region.to_vec(), pattern);
    // Dropping the host ends the thread; the handle goes on.
    drop(b);
    assert_eq!(vb.drive(), 0);
}

#[test]
fn an_idle_progress_thread_sleeps() {
    let a = host();
    let shared = Arc::clone(&a.shared);
    let (waker, stop) = (Arc::new(EventFd::new().unwrap()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let used = scope.spawn(|| {
            progress::run(&shared, &waker, &stop);
            thread_cpu_time().unwrap()
        });
        std::thread::sleep(SECOND);
        stop.store(true, Ordering::SeqCst);
        waker.set();
        assert!(used.join().unwrap() < SECOND / 100);
    });
}

#[test]
fn a_progress_thread_sleeps_while_the_program_is_in_a_long_round() {
    let a = host();
    let shared = Arc::clone(&a.shared);
    let (waker, stop) = (Arc::new(EventFd::new().unwrap()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let used = shared.inspect(|_| {
            let thread = scope.spawn(|| {
                progress::run(&shared, &waker, &stop);
                thread_cpu_time().unwrap()
            });
            std::thread::sleep(SECOND);
            thread
        });
        stop.store(true, Ordering::SeqCst);
        waker.set();
        assert!(used.join().unwrap() < SECOND / 100);
    });
}

#[test]
fn an_armed_cq_makes_its_descriptor_readable() {
    let (a, mut b) = (host(), host());
    b.spawn_progress().unwrap();
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    right.post_recv(&mut vb, 5);
    right.post_recv(&mut vb, 6);
    let fd = vb.completion_fd(right.cq).unwrap();
    let readable = |t| wait(&[Watch::Readable(fd.as_raw_fd())], Some(t)).unwrap() == 1;
    vb.req_notify(right.cq, Notify::Any).unwrap();
    assert!(!readable(Duration::ZERO));
    left.post(&mut va, 1, Operation::Send);
    // The program sleeps in its own poll(2); b's progress thread drives.
    assert!(readable(SECOND * 20));
    assert!(vb.take_notification(right.cq).unwrap());
    assert_eq!(right.completed(&mut vb).unwrap().wr_id, 5);
    assert_eq!(wait_one(&left, &mut va).wr_id, 1);
    // Once armed, told once.
    left.post(&mut va, 2, Operation::Send);
    assert_eq!(wait_one(&left, &mut va).wr_id, 2);
    assert_eq!(wait_one(&right, &mut vb).wr_id, 6);
    assert!(!vb.take_notification(right.cq).unwrap());
    // No other event came of it.
    assert!(!matches!(vb.poll_event(), Some(AsyncEvent::CqNotify(_))));
}

#[test]
fn without_a_descriptor_a_notification_is_an_event() {
    let (a, b) = (host(), host());
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    let fd = vb.event_fd().unwrap();
    right.post_recv(&mut vb, 5);
    vb.req_notify(right.cq, Notify::Any).unwrap();
    left.post(&mut va, 1, Operation::Send);
    assert_eq!(wait_one(&right, &mut vb).wr_id, 5);
    assert_eq!(wait(&[Watch::Readable(fd.as_raw_fd())], Some(Duration::ZERO)).unwrap(), 1);
    let events: Vec<_> = std::iter::from_fn(|| vb.poll_event()).collect();
    assert!(events.contains(&AsyncEvent::CqNotify(right.cq)), "{events:?}");
    assert_eq!(wait(&[Watch::Readable(fd.as_raw_fd())], Some(Duration::ZERO)).unwrap(), 0);
}

#[test]
fn a_descriptor_made_after_an_event_is_readable() {
    let (a, b) = (host(), host());
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    right.post_recv(&mut vb, 5);
    vb.req_notify(right.cq, Notify::Any).unwrap();
    left.post(&mut va, 1, Operation::Send);
    assert_eq!(wait_one(&right, &mut vb).wr_id, 5);
    let fd = vb.event_fd().unwrap();
    assert_eq!(wait(&[Watch::Readable(fd.as_raw_fd())], Some(Duration::ZERO)).unwrap(), 1);
}

#[test]
fn a_qp_in_error_flushes_what_another_thread_posts_while_one_waits() {
    let (a, b) = (host(), host());
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, _right) = pair(&mut va, &mut vb, 64);
    va.modify_qp(left.qp, QpTransition::Err.into()).unwrap();
    let mut poster = va.clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| va.wait_cq(left.cq, PATIENCE));
        std::thread::sleep(SECOND / 20);
        left.post_recv(&mut poster, 9);
        assert_eq!(waiting.join().unwrap(), Ok(true));
    });
    let mut out = [crate::engine::testing::blank(left.qp)];
    assert_eq!(va.poll_cq(left.cq, &mut out).unwrap(), 1);
    assert_eq!((out[0].wr_id, out[0].status), (9, WcStatus::WorkRequestFlushed));
}

#[test]
fn destroyed_objects_are_gone_for_every_handle() {
    let a = host();
    let mut one = a.handle();
    let side = Side::new(&mut one, 64);
    let mut two = one.clone();
    let mut out = [crate::engine::testing::blank(side.qp)];
    assert_eq!(two.poll_cq(side.cq, &mut out), Ok(0));
    assert_eq!(one.destroy_cq(side.cq), Err(VerbsError::Busy));
    one.destroy_qp(side.qp).unwrap();
    one.destroy_cq(side.cq).unwrap();
    assert_eq!(two.poll_cq(side.cq, &mut out), Err(VerbsError::InvalidHandle));
    assert_eq!(two.wait_cq(side.cq, PATIENCE), Err(VerbsError::InvalidHandle));
    let posted = two.post_recv(side.qp, &[RecvWr { wr_id: 1, sges: &[] }]);
    assert_eq!(posted, Err(PostListError { index: 0, error: PostError::InvalidHandle }));
}

/// A device that breaks when it is told to, as when its interface is removed.
struct Breaks<D>(D, std::sync::Arc<AtomicBool>);

impl<D: Device> Device for Breaks<D> {
    fn capabilities(&self) -> &crate::device::DeviceCapabilities {
        self.0.capabilities()
    }

    fn receive(
        &mut self,
        now: Instant,
        budget: usize,
        sink: &mut crate::device::RxSink<'_>,
    ) -> Result<usize, DeviceError> {
        if self.1.load(Ordering::SeqCst) { Err(DeviceError::Closed) } else { self.0.receive(now, budget, sink) }
    }

    fn transmit(
        &mut self,
        now: Instant,
        budget: usize,
        source: &mut crate::device::TxSource<'_>,
    ) -> Result<usize, DeviceError> {
        self.0.transmit(now, budget, source)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        self.0.wait(timeout)
    }
}

#[test]
fn a_program_that_only_polls_learns_that_the_device_failed() {
    let broken = Arc::new(AtomicBool::new(false));
    let (device, endpoint, clock) = engine().into_parts();
    let a = Host::new(Engine::with_clock(Breaks(device, Arc::clone(&broken)), endpoint, clock));
    let mut va = a.handle();
    let side = Side::new(&mut va, 64);
    let mut out = [crate::engine::testing::blank(side.qp)];
    assert_eq!(va.poll_cq(side.cq, &mut out), Ok(0));
    broken.store(true, Ordering::SeqCst);
    assert_eq!(va.poll_cq(side.cq, &mut out), Err(VerbsError::DeviceGone));
    assert_eq!(va.poll_cq(side.cq, &mut out), Err(VerbsError::DeviceGone));
    assert!(matches!(a.take_error(), Some(DeviceError::Closed)));
    assert!(a.take_error().is_none());
}

/// `right` polls until it has its receive; what `left` has by then, after looking often.
fn told_before_it_acknowledges(left: (&Side, &mut Handle), right: (&Side, &mut Handle)) -> Option<WorkCompletion> {
    right.0.post_recv(right.1, 7);
    left.0.post(left.1, 1, Operation::Send);
    while right.0.completed(right.1).is_none() {}
    for _ in 0..10 {
        if let Some(wc) = left.0.completed(left.1) {
            return Some(wc);
        }
    }
    None
}

#[test]
fn a_thread_that_spins_is_told_of_a_message_before_it_is_acknowledged() {
    let switch = Switch::new();
    let at = |last: u8| std::net::IpAddr::from([10, 0, 0, last]);
    let host = |last| Host::new(Engine::open(switch.port(&[at(last)])).unwrap());
    let (a, b) = (host(1), host(2));
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    // Who may sleep acknowledges at once, and so does who may not come back, with nobody in its place.
    assert!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)).is_some());
    vb.set_poll_policy(PollPolicy::Spin);
    assert!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)).is_some());
    b.shared.attended.store(true, Ordering::SeqCst);
    assert_eq!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)), None);
    // The next call does it, whatever it is for.
    vb.drive();
    assert!(left.completed(&mut va).is_some());
    assert_eq!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)), None);
    // An answer goes ahead of the ACK, and what is posted behind it takes that along.
    right.post(&mut vb, 2, Operation::Write(left.remote()));
    assert_eq!(left.completed(&mut va), None);
    right.post(&mut vb, 3, Operation::Write(left.remote()));
    assert!(left.completed(&mut va).is_some());
    wait_one(&right, &mut vb);
    wait_one(&right, &mut vb);
    assert_eq!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)), None);
    vb.destroy_qp(right.qp).unwrap();
    assert!(left.completed(&mut va).is_some());
}

#[test]
fn what_a_thread_left_unsaid_is_said_when_the_host_ends() {
    let switch = Switch::new();
    let host = |last: u8| Host::new(Engine::open(switch.port(&[[10, 0, 0, last].into()])).unwrap());
    let (a, b) = (host(1), host(2));
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    vb.set_poll_policy(PollPolicy::Spin);
    b.shared.attended.store(true, Ordering::SeqCst);
    assert_eq!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)), None);
    drop((vb, b));
    assert!(left.completed(&mut va).is_some());
}

#[test]
fn the_progress_thread_says_what_a_thread_that_does_not_come_back_left_unsaid() {
    let switch = Switch::new();
    let host = |last: u8| Host::new(Engine::open(switch.port(&[[10, 0, 0, last].into()])).unwrap());
    let (a, mut b) = (host(1), host(2));
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    b.spawn_progress().unwrap();
    vb.set_poll_policy(PollPolicy::Spin);
    for wr_id in 0..20 {
        right.post_recv(&mut vb, wr_id);
        left.post(&mut va, wr_id, Operation::Send);
        while right.completed(&mut vb).is_none() {}
        wait_one(&left, &mut va);
    }
}

#[test]
fn a_progress_thread_that_ends_while_another_drives_leaves_nothing_unsaid() {
    let switch = Switch::new();
    let host = |last: u8| Host::new(Engine::open(switch.port(&[[10, 0, 0, last].into()])).unwrap());
    let (a, b) = (host(1), host(2));
    let (mut va, mut vb) = (a.handle(), b.handle());
    let (left, right) = pair(&mut va, &mut vb, 64);
    vb.set_poll_policy(PollPolicy::Spin);
    b.shared.attended.store(true, Ordering::SeqCst);
    assert_eq!(told_before_it_acknowledges((&left, &mut va), (&right, &mut vb)), None);
    let (waker, stop) = (Arc::new(EventFd::new().unwrap()), AtomicBool::new(true));
    std::thread::scope(|scope| {
        // Whoever holds the lock looks at something, and drives no round.
        b.shared.inspect(|_| {
            let ending = scope.spawn(|| progress::run(&b.shared, &waker, &stop));
            // Until it has given up, or waits for us; which of the two must make no difference.
            for _ in 0..50 {
                if ending.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    });
    assert!(left.completed(&mut va).is_some());
}
