//! The eBPF program that takes RoCEv2 for an endpoint out of what an interface receives.
//!
//! Owns what is taken: UDP to port 4791 of the endpoint's MAC and addresses, in one piece and behind plain headers. All
//! else, ARP and ping included, goes to the kernel as if the program were not there, and so does a frame whose queue has no
//! socket. Never decides what a frame is for: whoever reads it checks again.

use core::net::IpAddr;

use super::asm::{Asm, Insn, R0, R1, R2, R3, R4, R5, R6, When, Width};
use crate::types::MacAddr;
use crate::wire::Flow;

/// Addresses that one program distinguishes. Frames to further ones take the way through the kernel.
pub(super) const ADDRESSES_MAX: usize = 256;
/// Hands a frame to the kernel.
pub(super) const PASS: i32 = 2;
/// The helper `bpf_redirect_map`.
const REDIRECT_MAP: i32 = 51;
/// Fields of `struct xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const QUEUE: i16 = 16;
const VLAN: u16 = 0x8100;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const UDP: u32 = 17;
/// More fragments, and the offset.
const FRAGMENT: u16 = 0x3fff;
const VLAN_ID: u16 = 0xfff;
const ETHERNET: i16 = 14;
const TAG: i16 = 4;

/// What shall be taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// Our MAC.
    pub(super) mac: MacAddr,
    /// Our addresses.
    pub(super) addresses: &'a [IpAddr],
    /// The VLAN, by a tag in the frame; `None`: untagged, and frames whose tag states a priority alone.
    pub(super) vlan: Option<u16>,
    /// Bytes of the largest IP packet. What is longer is a superframe.
    pub(super) mtu: usize,
    /// Whether what is received may be a superframe, of which the program sees one packet and no segments. The kernel
    /// makes them only with a UDP checksum that is not 0, so a packet with one goes to the kernel, which knows the segments.
    pub(super) superframes: bool,
    /// What becomes of a frame for us whose queue has no socket.
    pub(super) on_miss: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    Untagged,
    Network,
    Ipv4,
    Next(usize),
    Steer,
    Pass,
}

/// The program, for the map with this descriptor; `None` if it cannot be written (it can).
pub(super) fn program(wanted: Wanted<'_>, map: i32) -> Option<Vec<Insn>> {
    let mut asm = Asm::new();
    asm.copy(R6, R1);
    asm.load(Width::Word, R2, R1, DATA);
    asm.load(Width::Word, R3, R1, DATA_END);
    link(&mut asm, wanted);
    asm.label(Label::Network);
    asm.go_if(When::Equal, R5, net(IPV4), Label::Ipv4);
    asm.go_if(When::NotEqual, R5, net(IPV6), Label::Pass);
    ipv6(&mut asm, wanted);
    asm.label(Label::Ipv4);
    ipv4(&mut asm, wanted);
    asm.label(Label::Steer);
    asm.load(Width::Word, R2, R6, QUEUE);
    asm.map(R1, map);
    asm.set(R3, wanted.on_miss);
    asm.call(REDIRECT_MAP);
    asm.exit();
    asm.label(Label::Pass);
    asm.set(R0, PASS);
    asm.exit();
    asm.resolved()
}

/// MAC and tag. Leaves R2 14 bytes before the network header, and its kind in R5.
fn link(asm: &mut Asm<Label>, wanted: Wanted<'_>) {
    reach(asm, ETHERNET);
    let [a, b, c, d, e, f] = wanted.mac.0;
    unless(asm, Width::Word, 0, u32::from_ne_bytes([a, b, c, d]));
    unless(asm, Width::Half, 4, u16::from_ne_bytes([e, f]).into());
    asm.load(Width::Half, R5, R2, 12);
    asm.go_if(When::NotEqual, R5, net(VLAN), Label::Untagged);
    reach(asm, ETHERNET + TAG);
    asm.load(Width::Half, R5, R2, 14);
    asm.and(R5, net(VLAN_ID));
    asm.go_if(When::NotEqual, R5, net(wanted.vlan.unwrap_or(0)), Label::Pass);
    asm.load(Width::Half, R5, R2, 16);
    asm.add(R2, TAG.into());
    asm.go(Label::Network);
    asm.label(Label::Untagged);
    if wanted.vlan.is_some() {
        asm.go(Label::Pass);
    }
}

fn ipv4(asm: &mut Asm<Label>, wanted: Wanted<'_>) {
    reach(asm, ETHERNET + 20 + 8);
    // Version 4, five words: no options.
    unless(asm, Width::Byte, 14, 0x45);
    unless(asm, Width::Byte, 23, UDP);
    asm.load(Width::Half, R4, R2, 20);
    asm.go_if(When::AnyBitOf, R4, net(FRAGMENT), Label::Pass);
    unless(asm, Width::Half, 36, net(Flow::PORT));
    no_superframe(asm, wanted, 16, 0, 40);
    asm.load(Width::Word, R4, R2, 30);
    for address in wanted.addresses.iter().take(ADDRESSES_MAX) {
        if let IpAddr::V4(address) = address {
            asm.go_if(When::Equal, R4, u32::from_ne_bytes(address.octets()), Label::Steer);
        }
    }
    asm.go(Label::Pass);
}

fn ipv6(asm: &mut Asm<Label>, wanted: Wanted<'_>) {
    reach(asm, ETHERNET + 40 + 8);
    asm.load(Width::Byte, R4, R2, 14);
    asm.and(R4, 0xf0);
    asm.go_if(When::NotEqual, R4, 0x60, Label::Pass);
    // An extension header would stand here.
    unless(asm, Width::Byte, 20, UDP);
    unless(asm, Width::Half, 56, net(Flow::PORT));
    no_superframe(asm, wanted, 18, 40, 60);
    for (i, address) in wanted.addresses.iter().take(ADDRESSES_MAX).enumerate() {
        let IpAddr::V6(address) = address else { continue };
        for (word, at) in address.octets().chunks_exact(4).zip([38, 42, 46, 50]) {
            let Some(&word) = word.first_chunk::<4>() else { continue };
            asm.load(Width::Word, R4, R2, at);
            asm.go_if(When::NotEqual, R4, u32::from_ne_bytes(word), Label::Next(i));
        }
        asm.go(Label::Steer);
        asm.label(Label::Next(i));
    }
    asm.go(Label::Pass);
}

/// A length, stated at `length` without `apart` bytes, that no packet has; a checksum at `checksum` that only the system
/// writes.
fn no_superframe(asm: &mut Asm<Label>, wanted: Wanted<'_>, length: i16, apart: usize, checksum: i16) {
    asm.load(Width::Half, R4, R2, length);
    asm.number16(R4);
    let most = u32::try_from(wanted.mtu.saturating_sub(apart)).unwrap_or(u32::MAX);
    asm.go_if(When::Above, R4, most, Label::Pass);
    if wanted.superframes {
        unless(asm, Width::Half, checksum, 0);
    }
}

/// Passes a frame that has not these many bytes from R2 on.
fn reach(asm: &mut Asm<Label>, bytes: i16) {
    asm.copy(R4, R2);
    asm.add(R4, bytes.into());
    asm.go_if_above(R4, R3, Label::Pass);
}

/// Passes a frame that has another value there.
fn unless(asm: &mut Asm<Label>, width: Width, at: i16, value: u32) {
    asm.load(width, R4, R2, at);
    asm.go_if(When::NotEqual, R4, value, Label::Pass);
}

/// What a load of 16 bits from a packet gives for `value`.
fn net(value: u16) -> u32 {
    value.to_be().into()
}

#[cfg(test)]
mod tests;
