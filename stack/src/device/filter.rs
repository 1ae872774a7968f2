//! The classic BPF program that keeps foreign frames away from a raw socket.
//!
//! Owns what a raw device wants of the frames that an interface hears: RoCEv2 to its own addresses, what resolution
//! needs, and, where it answers for its addresses, ARP, neighbour solicitation and ping. Never decides what a frame is
//! for: whoever reads it checks again.

use core::net::IpAddr;

use socket2::SockFilter;

use crate::wire::Flow;

/// Addresses that one program distinguishes; with more, it lets RoCEv2 and ping to any address up.
pub(super) const ADDRESSES_MAX: usize = 256;
/// Bytes of a frame that are let through: all.
const WHOLE: u32 = 0x4_0000;
const OUTGOING: u32 = 4;
const VLAN_ID: u32 = 0xfff;
const FRAGMENT_OFFSET: u32 = 0x1fff;
const ETHERTYPE: u32 = 12;
const ARP: u32 = 0x0806;
const IPV4: u32 = 0x0800;
const IPV6: u32 = 0x86dd;
const ICMP: u32 = 1;
const UDP: u32 = 17;
const ICMPV6: u32 = 58;

/// What shall come up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// Our addresses.
    pub(super) addresses: &'a [IpAddr],
    /// The VLAN; `None`: untagged, and frames that carry a priority alone.
    pub(super) vlan: Option<u16>,
    /// Whether we answer for the addresses.
    pub(super) answers: bool,
}

/// A program that drops everything.
pub(super) fn nothing() -> Vec<SockFilter> {
    vec![SockFilter::new(op(libc::BPF_RET | libc::BPF_K), 0, 0, 0)]
}

/// The program.
pub(super) fn program(wanted: Wanted<'_>) -> Vec<SockFilter> {
    assemble(wanted).resolved().into_iter().map(|i| SockFilter::new(op(i.code), i.jt, i.jf, i.k)).collect()
}

fn assemble(wanted: Wanted<'_>) -> Asm {
    let mut asm = Asm::default();
    asm.ancillary(libc::SKF_AD_PKTTYPE);
    asm.go_if(OUTGOING, Label::Drop);
    vlan(&mut asm, wanted.vlan);
    asm.load(libc::BPF_H, ETHERTYPE);
    asm.go_if(ARP, Label::Accept);
    asm.go_if(IPV4, Label::Ipv4);
    asm.go_unless(IPV6, Label::Drop);
    ipv6(&mut asm, wanted);
    asm.label(Label::Ipv4);
    ipv4(&mut asm, wanted);
    asm.label(Label::Accept);
    asm.emit(libc::BPF_RET | libc::BPF_K, 0, 0, WHOLE);
    asm.label(Label::Drop);
    asm.emit(libc::BPF_RET | libc::BPF_K, 0, 0, 0);
    asm
}

/// The system has taken the outermost tag out of the frame when the program runs.
fn vlan(asm: &mut Asm, vlan: Option<u16>) {
    asm.ancillary(libc::SKF_AD_VLAN_TAG_PRESENT);
    asm.go_if(0, if vlan.is_some() { Label::Drop } else { Label::Untagged });
    asm.ancillary(libc::SKF_AD_VLAN_TAG);
    asm.emit(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, VLAN_ID);
    asm.go_unless(vlan.unwrap_or(0).into(), Label::Drop);
    asm.label(Label::Untagged);
}

fn ipv6(asm: &mut Asm, wanted: Wanted<'_>) {
    asm.load(libc::BPF_B, 20);
    asm.go_if(UDP, Label::Ipv6Udp);
    asm.go_unless(ICMPV6, Label::Drop);
    asm.load(libc::BPF_B, 54);
    asm.go_if(136, Label::Accept);
    if wanted.answers {
        asm.go_if(135, Label::Accept);
        asm.go_if(128, Label::Ipv6Destination);
    }
    asm.go(Label::Drop);
    asm.label(Label::Ipv6Udp);
    asm.load(libc::BPF_H, 56);
    asm.go_unless(Flow::PORT.into(), Label::Drop);
    asm.load(libc::BPF_B, 38);
    asm.go_if(0xff, Label::Accept);
    asm.label(Label::Ipv6Destination);
    if wanted.addresses.len() > ADDRESSES_MAX {
        asm.go(Label::Accept);
    }
    for (i, address) in wanted.addresses.iter().take(ADDRESSES_MAX).enumerate() {
        let IpAddr::V6(address) = address else { continue };
        let bits = address.to_bits();
        for (word, shift) in [(0, 96), (1, 64), (2, 32), (3, 0)] {
            #[allow(clippy::cast_possible_truncation)] // One word of four.
            let value = (bits >> shift) as u32;
            asm.load(libc::BPF_W, 38 + 4 * word);
            asm.go_unless(value, Label::Next(i));
        }
        asm.go(Label::Accept);
        asm.label(Label::Next(i));
    }
    asm.go(Label::Drop);
}

fn ipv4(asm: &mut Asm, wanted: Wanted<'_>) {
    asm.load(libc::BPF_B, 23);
    asm.go_if(ICMP, if wanted.answers { Label::Ipv4Destination } else { Label::Drop });
    asm.go_unless(UDP, Label::Drop);
    // Only the first fragment has ports. It comes up, to be counted.
    asm.load(libc::BPF_H, 20);
    asm.branch(libc::BPF_JSET, FRAGMENT_OFFSET, true, Label::Drop);
    asm.emit(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 14);
    asm.emit(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 16);
    asm.go_unless(Flow::PORT.into(), Label::Drop);
    asm.load(libc::BPF_B, 30);
    asm.emit(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, 0xf0);
    asm.go_if(0xe0, Label::Accept);
    asm.label(Label::Ipv4Destination);
    if wanted.addresses.len() > ADDRESSES_MAX {
        asm.go(Label::Accept);
    }
    asm.load(libc::BPF_W, 30);
    for address in wanted.addresses.iter().take(ADDRESSES_MAX) {
        if let IpAddr::V4(address) = address {
            asm.go_if(address.to_bits(), Label::Accept);
        }
    }
    asm.go(Label::Drop);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    Untagged,
    Ipv4,
    Ipv4Destination,
    Ipv6Udp,
    Ipv6Destination,
    Next(usize),
    Accept,
    Drop,
}

#[derive(Clone, Copy, Debug)]
struct Insn {
    code: u32,
    jt: u8,
    jf: u8,
    k: u32,
    target: Option<Label>,
}

/// Jumps go forward only. Conditional jumps reach 255 instructions, so a condition only steps over an unconditional jump, which reaches all.
#[derive(Default)]
struct Asm {
    code: Vec<Insn>,
    labels: Vec<(Label, usize)>,
}

impl Asm {
    fn emit(&mut self, code: u32, jt: u8, jf: u8, k: u32) {
        self.code.push(Insn { code, jt, jf, k, target: None });
    }

    fn load(&mut self, width: u32, at: u32) {
        self.emit(libc::BPF_LD | width | libc::BPF_ABS, 0, 0, at);
    }

    fn ancillary(&mut self, what: i32) {
        self.load(libc::BPF_W, (libc::SKF_AD_OFF + what).cast_unsigned());
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.code.len()));
    }

    fn go(&mut self, to: Label) {
        self.code.push(Insn { code: libc::BPF_JMP | libc::BPF_JA, jt: 0, jf: 0, k: 0, target: Some(to) });
    }

    fn go_if(&mut self, value: u32, to: Label) {
        self.branch(libc::BPF_JEQ, value, true, to);
    }

    fn go_unless(&mut self, value: u32, to: Label) {
        self.branch(libc::BPF_JEQ, value, false, to);
    }

    fn branch(&mut self, test: u32, value: u32, when: bool, to: Label) {
        let (jt, jf) = if when { (0, 1) } else { (1, 0) };
        self.emit(libc::BPF_JMP | test | libc::BPF_K, jt, jf, value);
        self.go(to);
    }

    fn resolved(&self) -> Vec<Insn> {
        let place = |label| self.labels.iter().find(|l| l.0 == label).map_or(self.code.len(), |l| l.1);
        let resolve = |(i, insn): (usize, &Insn)| match insn.target {
            Some(label) => Insn { k: u32::try_from(place(label).saturating_sub(i + 1)).unwrap_or(u32::MAX), ..*insn },
            None => *insn,
        };
        self.code.iter().enumerate().map(resolve).collect()
    }
}

/// Opcodes are 16 bits.
fn op(code: u32) -> u16 {
    u16::try_from(code).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with a frame: just as much of its machine as the programs use.
    fn passes(program: &[Insn], frame: &[u8], kind: u32, tag: Option<u16>) -> bool {
        let (mut a, mut x, mut pc) = (0u32, 0u32, 0usize);
        let read = |at: usize, n: usize| Some(frame.get(at..at + n)?.iter().fold(0u32, |v, b| v << 8 | u32::from(*b)));
        loop {
            let i = program[pc];
            pc += 1;
            let width = |code| match code & 0x18 {
                libc::BPF_W => 4,
                libc::BPF_H => 2,
                _ => 1,
            };
            match i.code & 7 {
                libc::BPF_LD => {
                    let special = i.k.wrapping_sub(libc::SKF_AD_OFF.cast_unsigned()).cast_signed();
                    let value = match special {
                        libc::SKF_AD_PKTTYPE => Some(kind),
                        libc::SKF_AD_VLAN_TAG_PRESENT => Some(u32::from(tag.is_some())),
                        libc::SKF_AD_VLAN_TAG => Some(tag.unwrap_or(0).into()),
                        _ => {
                            let base = if i.code & 0xe0 == libc::BPF_IND { x } else { 0 };
                            read((base + i.k) as usize, width(i.code))
                        }
                    };
                    let Some(value) = value else { return false };
                    a = value;
                }
                libc::BPF_LDX => match read(i.k as usize, 1) {
                    Some(v) => x = 4 * (v & 15),
                    None => return false,
                },
                libc::BPF_ALU => a &= i.k,
                libc::BPF_JMP if i.code & 0xf0 == libc::BPF_JA => pc += i.k as usize,
                libc::BPF_JMP => {
                    let hit = if i.code & 0xf0 == libc::BPF_JSET { a & i.k != 0 } else { a == i.k };
                    pc += usize::from(if hit { i.jt } else { i.jf });
                }
                _ => return i.k > 0,
            }
        }
    }

    fn ours() -> Vec<IpAddr> {
        ["10.0.0.1", "10.0.0.3", "fe80::1", "fd00::1"].map(|a| a.parse().unwrap()).to_vec()
    }

    fn v4(protocol: u8, dst: &str, port: u16, words: u8, fragment: u16) -> Vec<u8> {
        let mut f = vec![0; 14 + usize::from(words) * 4 + 8];
        f[12..14].copy_from_slice(&[8, 0]);
        f[14] = 0x40 | words;
        f[20..22].copy_from_slice(&fragment.to_be_bytes());
        f[23] = protocol;
        f[30..34].copy_from_slice(&dst.parse::<core::net::Ipv4Addr>().unwrap().octets());
        let udp = 14 + usize::from(words) * 4;
        f[udp + 2..udp + 4].copy_from_slice(&port.to_be_bytes());
        f
    }

    fn v6(next: u8, dst: &str, port: u16, kind: u8) -> Vec<u8> {
        let mut f = vec![0; 62];
        f[12..14].copy_from_slice(&[0x86, 0xdd]);
        f[20] = next;
        f[38..54].copy_from_slice(&dst.parse::<core::net::Ipv6Addr>().unwrap().octets());
        f[54] = kind;
        f[56..58].copy_from_slice(&port.to_be_bytes());
        f
    }

    fn program_for(addresses: &[IpAddr], vlan: Option<u16>, answers: bool) -> Vec<Insn> {
        assemble(Wanted { addresses, vlan, answers }).resolved()
    }

    #[test]
    fn rocev2_to_us_alone() {
        let program = program_for(&ours(), None, false);
        let up = |frame: &[u8]| passes(&program, frame, 0, None);
        assert!(up(&v4(17, "10.0.0.1", 4791, 5, 0x4000)));
        assert!(up(&v4(17, "10.0.0.3", 4791, 5, 0)));
        assert!(up(&v4(17, "10.0.0.1", 4791, 7, 0x4000)), "options: to be counted");
        assert!(up(&v4(17, "10.0.0.1", 4791, 5, 0x2000)), "first fragment: to be counted");
        assert!(up(&v4(17, "239.1.1.1", 4791, 5, 0x4000)));
        assert!(!up(&v4(17, "10.0.0.1", 4791, 5, 0x2001)), "a later fragment has no ports");
        assert!(!up(&v4(17, "10.0.0.2", 4791, 5, 0x4000)));
        assert!(!up(&v4(17, "10.0.0.1", 53, 5, 0x4000)));
        assert!(!up(&v4(6, "10.0.0.1", 4791, 5, 0x4000)));
        assert!(up(&v6(17, "fd00::1", 4791, 0)));
        assert!(up(&v6(17, "fe80::1", 4791, 0)));
        assert!(up(&v6(17, "ff0e::5", 4791, 0)));
        assert!(!up(&v6(17, "fd00::2", 4791, 0)));
        assert!(!up(&v6(17, "fd00::1", 53, 0)));
        assert!(!up(&v6(6, "fd00::1", 4791, 0)));
        assert!(!passes(&program, &v4(17, "10.0.0.1", 4791, 5, 0), OUTGOING, None), "our own");
        assert!(!up(&[0; 14]));
        assert!(!up(&[]));
    }

    #[test]
    fn resolution_and_what_we_answer() {
        let addresses = ours();
        let mut arp = vec![0; 42];
        arp[12..14].copy_from_slice(&[8, 6]);
        let (shared, own) = (program_for(&addresses, None, false), program_for(&addresses, None, true));
        let advert = v6(58, "fd00::1", 0, 136);
        for frame in [&arp, &advert] {
            assert!(passes(&shared, frame, 0, None));
            assert!(passes(&own, frame, 0, None));
        }
        for frame in [v6(58, "ff02::1:ff00:1", 0, 135), v6(58, "fd00::1", 0, 128), v4(1, "10.0.0.1", 0, 5, 0)] {
            assert!(!passes(&shared, &frame, 0, None));
            assert!(passes(&own, &frame, 0, None));
        }
        assert!(!passes(&own, &v6(58, "fd00::2", 0, 128), 0, None));
        assert!(!passes(&own, &v6(58, "fd00::1", 0, 1), 0, None));
        assert!(!passes(&own, &v4(1, "10.0.0.2", 0, 5, 0), 0, None));
    }

    #[test]
    fn vlans() {
        let addresses = ours();
        let frame = v4(17, "10.0.0.1", 4791, 5, 0x4000);
        let untagged = program_for(&addresses, None, false);
        assert!(passes(&untagged, &frame, 0, Some(0xe000)), "priority alone");
        assert!(!passes(&untagged, &frame, 0, Some(5)));
        let five = program_for(&addresses, Some(5), false);
        assert!(passes(&five, &frame, 0, Some(0xe005)));
        assert!(!passes(&five, &frame, 0, Some(6)));
        assert!(!passes(&five, &frame, 0, None));
    }

    #[test]
    fn many_addresses_fit_the_kernels_limit() {
        for count in [ADDRESSES_MAX, ADDRESSES_MAX + 1] {
            let many: Vec<IpAddr> =
                (0..count as u128).map(|i| core::net::Ipv6Addr::from_bits(0xfd << 120 | i).into()).collect();
            let program = program_for(&many, None, true);
            assert!(program.len() <= 4096);
            assert!(passes(&program, &v6(17, &many[count - 1].to_string(), 4791, 0), 0, None));
            assert_eq!(passes(&program, &v6(17, "fd01::", 4791, 0), 0, None), count > ADDRESSES_MAX);
        }
    }
}
