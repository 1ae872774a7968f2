//! Alternate paths.

use super::Agent;
use super::receive::Arrived;
use crate::wire::{Apr, AprStatus, Ari, Lap, PrivateData};

impl Agent {
    /// Alternate paths are not offered yet.
    pub(super) fn on_lap(&mut self, cx: &Arrived<'_>, lap: &Lap) {
        let known = self.find(cx, lap.remote_comm_id, lap.local_comm_id).is_some();
        let apr = Apr {
            local_comm_id: lap.remote_comm_id,
            remote_comm_id: lap.local_comm_id,
            status: if known { AprStatus::Unsupported } else { AprStatus::InvalidCommId },
            info: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        };
        self.send(cx.from, cx.transaction(), apr);
    }
}
