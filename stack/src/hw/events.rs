//! What the device announces: completions on armed queues, and asynchronous events.

use std::os::fd::RawFd;

use super::{HwDevice, Object, abi};
use crate::device::sys::poll::{self, Watch};
use crate::time::Duration;
use crate::verbs::{AsyncEvent, VerbsError};

/// Events that wait for the program; the library keeps the rest.
const EVENTS_MAX: usize = 4096;

impl HwDevice {
    /// Descriptors that are readable while [`crate::verbs::Verbs::poll_event`] may have something: of completion queues,
    /// and of everything else. They belong to the device.
    #[must_use]
    pub fn descriptors(&self) -> [RawFd; 2] {
        [self.channel.fd(), self.context.async_fd()]
    }

    /// Sleeps until the device announces something, or `timeout`.
    pub(super) fn sleep(&mut self, timeout: Option<Duration>) -> Result<(), VerbsError> {
        let watch = self.descriptors().map(Watch::Readable);
        let call =
            |e: std::io::Error| VerbsError::System { call: "ppoll", errno: e.raw_os_error().unwrap_or(libc::EIO) };
        poll::wait(&watch, timeout).map_err(call)?;
        self.read_events();
        Ok(())
    }

    /// Takes what the library has.
    pub(super) fn read_events(&mut self) {
        while self.events.len() < EVENTS_MAX
            && let Some(cookie) = self.channel.next_event()
        {
            self.on_completion(cookie);
        }
        while self.events.len() < EVENTS_MAX
            && let Some((event_type, cookie)) = self.context.next_event()
        {
            let object = self.by_cookie.get(&cookie).copied();
            let Some(event) = async_event(event_type, object) else { continue };
            self.gone |= event == AsyncEvent::DeviceFatal;
            self.events.push_back(event);
        }
    }

    /// A wait arms a queue for itself: only a program that asked is told.
    fn on_completion(&mut self, cookie: usize) {
        let Some(Object::Cq(handle)) = self.by_cookie.get(&cookie).copied() else { return };
        let Some(entry) = self.cqs.get_mut(handle) else { return };
        if core::mem::take(&mut entry.armed) {
            self.events.push_back(AsyncEvent::CqNotify(handle));
        }
    }
}

/// The event, if it is one that we know and its object is still there. Changes of LID, P_Key table and subnet manager do
/// not happen on RoCE.
fn async_event(event_type: u32, object: Option<Object>) -> Option<AsyncEvent> {
    let event = match (event_type, object) {
        (abi::EVENT_CQ_ERR, Some(Object::Cq(cq))) => AsyncEvent::CqError(cq),
        (abi::EVENT_QP_FATAL, Some(Object::Qp(qp))) => AsyncEvent::QpFatal(qp),
        (abi::EVENT_QP_REQ_ERR, Some(Object::Qp(qp))) => AsyncEvent::QpRequestError(qp),
        (abi::EVENT_QP_ACCESS_ERR, Some(Object::Qp(qp))) => AsyncEvent::QpAccessError(qp),
        (abi::EVENT_COMM_EST, Some(Object::Qp(qp))) => AsyncEvent::CommunicationEstablished(qp),
        (abi::EVENT_SQ_DRAINED, Some(Object::Qp(qp))) => AsyncEvent::SendQueueDrained(qp),
        (abi::EVENT_PATH_MIG, Some(Object::Qp(qp))) => AsyncEvent::PathMigrated(qp),
        (abi::EVENT_PATH_MIG_ERR, Some(Object::Qp(qp))) => AsyncEvent::PathMigrationFailed(qp),
        (abi::EVENT_QP_LAST_WQE_REACHED, Some(Object::Qp(qp))) => AsyncEvent::LastWqeReached(qp),
        (abi::EVENT_SRQ_LIMIT_REACHED, Some(Object::Srq(srq))) => AsyncEvent::SrqLimitReached(srq),
        (abi::EVENT_SRQ_ERR, Some(Object::Srq(srq))) => AsyncEvent::SrqError(srq),
        (abi::EVENT_PORT_ACTIVE, _) => AsyncEvent::PortActive,
        (abi::EVENT_PORT_ERR, _) => AsyncEvent::PortError,
        (abi::EVENT_GID_CHANGE, _) => AsyncEvent::GidChange,
        (abi::EVENT_DEVICE_FATAL, _) => AsyncEvent::DeviceFatal,
        _ => return None,
    };
    Some(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Slab;

    #[test]
    fn every_event_that_roce_has_is_known_with_its_object() {
        let (mut qps, mut cqs, mut srqs) = (Slab::new(1), Slab::new(1), Slab::new(1));
        let (qp, cq, srq) = (qps.insert(()).unwrap(), cqs.insert(()).unwrap(), srqs.insert(()).unwrap());
        // By the numbers of enum ibv_event_type.
        let wanted = [
            Some(AsyncEvent::CqError(cq)),
            Some(AsyncEvent::QpFatal(qp)),
            Some(AsyncEvent::QpRequestError(qp)),
            Some(AsyncEvent::QpAccessError(qp)),
            Some(AsyncEvent::CommunicationEstablished(qp)),
            Some(AsyncEvent::SendQueueDrained(qp)),
            Some(AsyncEvent::PathMigrated(qp)),
            Some(AsyncEvent::PathMigrationFailed(qp)),
            Some(AsyncEvent::DeviceFatal),
            Some(AsyncEvent::PortActive),
            Some(AsyncEvent::PortError),
            None,
            None,
            None,
            Some(AsyncEvent::SrqError(srq)),
            Some(AsyncEvent::SrqLimitReached(srq)),
            Some(AsyncEvent::LastWqeReached(qp)),
            None,
            Some(AsyncEvent::GidChange),
            None,
        ];
        for (number, wanted) in (0..).zip(wanted) {
            let object = match abi::subject(number) {
                abi::Subject::Cq => Some(Object::Cq(cq)),
                abi::Subject::Srq => Some(Object::Srq(srq)),
                abi::Subject::Qp => Some(Object::Qp(qp)),
                abi::Subject::Device => None,
            };
            assert_eq!(async_event(number, object), wanted, "{number}");
            // An object that was destroyed meanwhile has no events.
            let is_about_one = object.is_some();
            assert_eq!(async_event(number, None).is_none(), is_about_one || wanted.is_none(), "{number}");
        }
    }
}
