//! rxe's ICRC of a FLUSH.
//!
//! Owns what of it differs, as a device between an endpoint and an rxe. Never touches another packet.

use std::time::Duration;

use uroce::burst::{Medium, RxBurst, TxBurst, TxRoom};
use uroce::device::{Device, DeviceCapabilities, DeviceError, RxSink, TxSource};

/// BTH, FETH and RETH; the ICRC stands behind them.
const FLUSH_LEN: usize = 32;
const FLUSH_OPCODE: u8 = 0x1C;
const ICRC_LEN: usize = 4;
/// The CRC-32 of Ethernet, reflected.
const POLYNOMIAL: u32 = 0xEDB8_8320;

/// `icrc` carried on over `bytes`.
fn carried_on(icrc: u32, bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(!icrc, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

/// The value that carried on over `bytes` is `icrc`.
fn carried_back(icrc: u32, bytes: &[u8]) -> u32 {
    // The bit that went out at the right is the top bit of what the polynomial made of it.
    let step = |crc: u32| if crc >> 31 == 1 { (crc ^ POLYNOMIAL) << 1 | 1 } else { crc << 1 };
    !bytes.iter().rev().fold(!icrc, |crc, byte| (0..8).fold(crc, |crc, _| step(crc)) ^ u32::from(*byte))
}

/// Replaces the ICRC of `packet`, if it is a FLUSH.
fn with_icrc(packet: &mut [u8], change: fn(u32, &[u8]) -> u32) {
    if packet.len() != FLUSH_LEN + ICRC_LEN || packet[0] != FLUSH_OPCODE {
        return;
    }
    let (headers, icrc) = packet.split_at_mut(FLUSH_LEN);
    let value = u32::from_le_bytes([icrc[0], icrc[1], icrc[2], icrc[3]]);
    icrc.copy_from_slice(&change(value, headers).to_le_bytes());
}

/// A device between an endpoint and an rxe.
pub(crate) struct RxeFlush<D> {
    pub(crate) inner: D,
    pub(crate) on: bool,
}

impl<D: Device> Device for RxeFlush<D> {
    fn capabilities(&self) -> &DeviceCapabilities {
        self.inner.capabilities()
    }

    fn receive(
        &mut self,
        now: uroce::time::Instant,
        budget: usize,
        sink: &mut RxSink<'_>,
    ) -> Result<usize, DeviceError> {
        let on = self.on;
        self.inner.receive(now, budget, &mut |burst: RxBurst<'_>| {
            if !on {
                return sink(burst);
            }
            let mut bytes = burst.bytes.to_vec();
            with_icrc(&mut bytes, carried_back);
            sink(RxBurst { bytes: &bytes, ..burst });
        })
    }

    fn transmit(
        &mut self,
        now: uroce::time::Instant,
        budget: usize,
        source: &mut TxSource<'_>,
    ) -> Result<usize, DeviceError> {
        let on = self.on;
        self.inner.transmit(now, budget, &mut |room: TxRoom<'_>| {
            let TxRoom { buf, headroom, .. } = room;
            let burst: TxBurst = source(TxRoom { buf: &mut *buf, ..room })?;
            let outer = if room.medium == Medium::Ip { burst.flow.header_len() } else { 0 };
            if on && burst.segments == 1 {
                with_icrc(&mut buf[headroom + outer..headroom + burst.len], carried_on);
            }
            Some(burst)
        })
    }

    fn poll_timeout(&self) -> Option<uroce::time::Instant> {
        self.inner.poll_timeout()
    }

    fn descriptor(&self) -> Option<std::os::fd::RawFd> {
        self.inner.descriptor()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), DeviceError> {
        self.inner.wait(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_icrc_is_carried_back_to_where_it_came_from() {
        let bytes: Vec<u8> = (0..32).collect();
        assert_eq!(carried_back(carried_on(0x1234_5678, &bytes), &bytes), 0x1234_5678);
        // From nothing it is the CRC-32 that everybody knows.
        assert_eq!(carried_on(0, b"123456789"), 0xCBF4_3926);
    }
}
