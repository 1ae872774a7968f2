//! From the agent's events to those of rdma_cm, with what the front does to an attached QP on the way.

use core::net::SocketAddr;

use uroce::time::Instant;
use uroce::verbs::Verbs;

use super::address;
use super::software::{Cm, Id, Stage};
use super::types::{Attempt, EventKind, IdEvent, IdHandle, PeerParam, STATUS_INVALID, STATUS_TIMED_OUT};
use crate::agent::{CmEvent, ConnectRequest, DisconnectCause, Rejection, Reply};
use crate::comm::CommId;
use crate::wire::RejReason;

/// Events of the front that wait for the program; beyond, the agent keeps its own and takes no new REQs.
const EVENTS_MAX: usize = 16_384;

impl Cm {
    /// Translates what the agent has to say. Returns whether it had anything.
    pub(super) fn translate_events(&mut self, now: Instant, verbs: &mut dyn Verbs) -> bool {
        let mut busy = false;
        while self.events.len() < EVENTS_MAX
            && let Some(event) = self.agent.poll_event()
        {
            busy = true;
            match event {
                CmEvent::ConnectRequest(request) => self.on_request(verbs, &request),
                CmEvent::Reply(reply) => self.on_reply(verbs, &reply),
                CmEvent::Established { comm, private_data } => {
                    self.tell_peer(comm, EventKind::Established, 0, private_data.as_bytes().to_vec(), None);
                }
                CmEvent::Rejected(rejection) => self.on_rejection(verbs, &rejection),
                CmEvent::Unreachable { comm, tries, elapsed, .. } => {
                    let attempt = Some(Attempt { tries, elapsed });
                    self.tell_peer(comm, EventKind::Unreachable, STATUS_TIMED_OUT, Vec::new(), attempt);
                    self.forget(comm);
                }
                CmEvent::DisconnectRequested { comm, private_data } => {
                    self.on_disconnected(comm, private_data.as_bytes().to_vec(), None);
                }
                CmEvent::Disconnected { comm, cause } => {
                    let attempt = match cause {
                        DisconnectCause::NoAnswer { tries, elapsed } => Some(Attempt { tries, elapsed }),
                        DisconnectCause::Agreed | DisconnectCause::Rejected(_) => None,
                    };
                    if let Some(id) = self.by_comm.get(&comm).copied() {
                        self.fail_qp(verbs, id);
                    }
                    self.on_disconnected(comm, Vec::new(), attempt);
                }
                CmEvent::TimewaitExit { comm } => {
                    if let Some(id) = self.forget(comm) {
                        self.tell(id, EventKind::TimewaitExit, 0);
                    }
                }
                path @ (CmEvent::PathOffered(_) | CmEvent::PathAnswered(_) | CmEvent::PathUnanswered { .. }) => {
                    self.on_path_event(verbs, &path);
                }
                service @ (CmEvent::ServiceRequest(_)
                | CmEvent::ServiceReply(_)
                | CmEvent::ServiceExpired { .. }
                | CmEvent::ServiceUnreachable { .. }) => self.on_service_event(now, verbs, &service),
            }
        }
        busy
    }

    fn on_request(&mut self, verbs: &mut dyn Verbs, request: &ConnectRequest) {
        let Some((listen_id, listener)) =
            request.listener.and_then(|l| self.by_listener.get(&l)).and_then(|id| self.ids.get(*id).map(|l| (*id, l)))
        else {
            // The listener was destroyed meanwhile.
            self.refuse(request.comm, RejReason::InvalidServiceId);
            return;
        };
        let mut id = Id::new(listener.space, listener.options);
        let local_ip = request.ip.map_or(request.path.local.ip(), |h| h.destination);
        let peer_ip = request.ip.map_or(request.path.remote.ip(), |h| h.source);
        let port = listener.local.map_or(0, |l| l.port());
        id.local = Some(SocketAddr::new(local_ip, port));
        id.peer = Some(SocketAddr::new(peer_ip, request.ip.map_or(0, |h| h.source_port)));
        id.gid = address::find(&verbs.query_gids(), request.path.local.ip());
        id.path = Some(request.path);
        id.stage = Stage::Comm(request.comm);
        let Some(handle) = self.ids.insert(id) else {
            self.refuse(request.comm, RejReason::NoResources);
            return;
        };
        self.by_comm.insert(request.comm, handle);
        self.events.push_back(IdEvent {
            listen_id: Some(listen_id),
            param: PeerParam {
                private_data: request.user_data().to_vec(),
                responder_resources: request.responder_resources,
                initiator_depth: request.initiator_depth,
                flow_control: request.flow_control,
                retry_count: request.retry_count.get(),
                rnr_retry_count: request.rnr_retry.code(),
                srq: request.srq,
                qp_num: request.remote_qpn,
            },
            ..IdEvent::new(handle, EventKind::ConnectRequest)
        });
    }

    fn refuse(&mut self, comm: CommId, reason: RejReason) {
        // The event is fresh: the communication still waits for an answer, or has gone by itself.
        let _ = self.agent.reject(comm, reason, &[], &[]);
    }

    fn on_reply(&mut self, verbs: &mut dyn Verbs, reply: &Reply) {
        let Some(handle) = self.by_comm.get(&reply.comm).copied() else { return };
        let Some(id) = self.ids.get_mut(handle) else { return };
        let ready = Self::ready_from(id, &reply.terms);
        id.ready = Some(ready);
        let qp = id.qp;
        let kind = match qp.map(|qp| ready.apply(verbs, qp)) {
            None => EventKind::ConnectResponse,
            Some(Ok(())) => {
                // A REP was just received, and there are no private data: it cannot be refused.
                let _ = self.agent.confirm(reply.comm, &[]);
                EventKind::Established
            }
            Some(Err(_)) => {
                self.refuse(reply.comm, RejReason::ConsumerDefined);
                self.forget(reply.comm);
                self.tell(handle, EventKind::ConnectError, STATUS_INVALID);
                return;
            }
        };
        self.events.push_back(IdEvent {
            param: PeerParam {
                private_data: reply.private_data.as_bytes().to_vec(),
                responder_resources: reply.responder_resources,
                initiator_depth: reply.initiator_depth,
                flow_control: reply.flow_control,
                retry_count: reply.terms.retry_count.get(),
                rnr_retry_count: reply.terms.rnr_retry.code(),
                srq: reply.terms.remote_srq,
                qp_num: reply.terms.remote_qpn,
            },
            ..IdEvent::new(handle, kind)
        });
    }

    fn on_rejection(&mut self, verbs: &mut dyn Verbs, rejection: &Rejection) {
        if let Some(id) = self.by_comm.get(&rejection.comm).copied() {
            self.fail_qp(verbs, id);
        }
        if let Some(id) = self.by_comm.get(&rejection.comm).copied() {
            let private_data = rejection.private_data.as_bytes().to_vec();
            self.events.push_back(IdEvent {
                status: rejection.reason.code().into(),
                param: PeerParam { private_data, ..PeerParam::default() },
                info: rejection.info(),
                ..IdEvent::new(id, EventKind::Rejected)
            });
        }
        if !rejection.timewait {
            self.forget(rejection.comm);
        }
    }

    /// DISCONNECTED, once a connection.
    fn on_disconnected(&mut self, comm: CommId, private_data: Vec<u8>, attempt: Option<Attempt>) {
        let Some(handle) = self.by_comm.get(&comm).copied() else { return };
        let Some(id) = self.ids.get_mut(handle) else { return };
        if !id.disconnected {
            id.disconnected = true;
            let status = if attempt.is_some() { STATUS_TIMED_OUT } else { 0 };
            self.tell_peer(comm, EventKind::Disconnected, status, private_data, attempt);
        }
    }

    fn tell_peer(
        &mut self,
        comm: CommId,
        kind: EventKind,
        status: i32,
        private_data: Vec<u8>,
        attempt: Option<Attempt>,
    ) {
        let Some(id) = self.by_comm.get(&comm).copied() else { return };
        let param = PeerParam { private_data, ..PeerParam::default() };
        self.events.push_back(IdEvent { status, param, attempt, ..IdEvent::new(id, kind) });
    }

    /// The communication is gone; its id stays until the program destroys it.
    fn forget(&mut self, comm: CommId) -> Option<IdHandle> {
        let handle = self.by_comm.remove(&comm)?;
        if let Some(id) = self.ids.get_mut(handle) {
            id.stage = Stage::Over;
        }
        Some(handle)
    }
}
