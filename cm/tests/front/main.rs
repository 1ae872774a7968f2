//! The front over real endpoints: QP1, attached QPs, and data.

#![allow(clippy::float_arithmetic)]

mod datagram;
mod lossy;
mod matcher;
mod net;
mod paths;
mod random;
mod sequence;
mod spaces;

use uroce::types::Qpn;
use uroce::verbs::{QpHandle, WcData, WcOpcode, WcStatus, WorkCompletion};

/// Room for a completion.
fn blank(qp: QpHandle) -> WorkCompletion {
    WorkCompletion {
        wr_id: 0,
        status: WcStatus::General,
        opcode: WcOpcode::Send,
        vendor_err: 0,
        byte_len: 0,
        data: WcData::None,
        qp,
        qp_num: Qpn::GSI,
        src_qp: Qpn::GSI,
        grh: false,
        solicited: false,
    }
}
