//! eBPF instructions by name, with labels to jump to.
//!
//! Owns the encoding of the few instructions that the filter is made of. Jumps go forward only, so a program ends. Never
//! knows what a program is for.

/// Registers, by their roles in a call.
pub(super) const R0: u8 = 0;
pub(super) const R1: u8 = 1;
pub(super) const R2: u8 = 2;
pub(super) const R3: u8 = 3;
pub(super) const R4: u8 = 4;
pub(super) const R5: u8 = 5;
/// The first one that a call leaves alone.
pub(super) const R6: u8 = 6;

/// Says that the constant of a wide load is the descriptor of a map.
const PSEUDO_MAP: u8 = 1;
const LOAD_WIDE: u8 = 0x18;
const MOVE_REGISTER: u8 = 0xbf;
const MOVE_CONSTANT: u8 = 0xb7;
const ADD_CONSTANT: u8 = 0x07;
const AND_CONSTANT: u8 = 0x54;
const TO_BIG_ENDIAN: u8 = 0xdc;
const JUMP: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// Bytes of a load from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Byte = 0x71,
    Half = 0x69,
    Word = 0x61,
}

/// When a jump is taken. All but the last compare 32 bits with a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Equal = 0x16,
    NotEqual = 0x56,
    Above = 0x26,
    AnyBitOf = 0x46,
}

/// `struct bpf_insn` of linux/bpf.h.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Insn {
    code: u8,
    registers: u8,
    offset: i16,
    constant: i32,
}

impl Insn {
    const fn new(code: u8, to: u8, from: u8, offset: i16, constant: i32) -> Self {
        // Two fields of four bits each, whose places the byte order of the machine decides.
        let registers = if cfg!(target_endian = "little") { from << 4 | to } else { to << 4 | from };
        Self { code, registers, offset, constant }
    }
}

/// A program in the making; `L` names its labels.
#[derive(Debug)]
pub(super) struct Asm<L> {
    code: Vec<Insn>,
    jumps: Vec<(usize, L)>,
    labels: Vec<(L, usize)>,
}

impl<L: Copy + PartialEq> Asm<L> {
    pub(super) const fn new() -> Self {
        Self { code: Vec::new(), jumps: Vec::new(), labels: Vec::new() }
    }

    fn emit(&mut self, code: u8, to: u8, from: u8, offset: i16, constant: i32) {
        self.code.push(Insn::new(code, to, from, offset, constant));
    }

    pub(super) fn load(&mut self, width: Width, to: u8, base: u8, at: i16) {
        self.emit(width as u8, to, base, at, 0);
    }

    pub(super) fn copy(&mut self, to: u8, from: u8) {
        self.emit(MOVE_REGISTER, to, from, 0, 0);
    }

    pub(super) fn set(&mut self, to: u8, value: i32) {
        self.emit(MOVE_CONSTANT, to, 0, 0, value);
    }

    pub(super) fn add(&mut self, to: u8, value: i32) {
        self.emit(ADD_CONSTANT, to, 0, 0, value);
    }

    pub(super) fn and(&mut self, to: u8, mask: u32) {
        self.emit(AND_CONSTANT, to, 0, 0, mask.cast_signed());
    }

    /// Turns 16 bits that were loaded from a packet into a number.
    pub(super) fn number16(&mut self, to: u8) {
        self.emit(TO_BIG_ENDIAN, to, 0, 0, 16);
    }

    pub(super) fn map(&mut self, to: u8, descriptor: i32) {
        self.emit(LOAD_WIDE, to, PSEUDO_MAP, 0, descriptor);
        self.emit(0, 0, 0, 0, 0);
    }

    pub(super) fn call(&mut self, helper: i32) {
        self.emit(CALL, 0, 0, 0, helper);
    }

    pub(super) fn exit(&mut self) {
        self.emit(EXIT, 0, 0, 0, 0);
    }

    pub(super) fn label(&mut self, label: L) {
        self.labels.push((label, self.code.len()));
    }

    pub(super) fn go(&mut self, to: L) {
        self.jump(JUMP, 0, 0, 0, to);
    }

    pub(super) fn go_if(&mut self, when: When, register: u8, value: u32, to: L) {
        self.jump(when as u8, register, 0, value.cast_signed(), to);
    }

    /// Jumps if pointer `left` is above pointer `right`.
    pub(super) fn go_if_above(&mut self, left: u8, right: u8, to: L) {
        /// 64 bits, between registers.
        const ABOVE_REGISTER: u8 = 0x2d;
        self.jump(ABOVE_REGISTER, left, right, 0, to);
    }

    fn jump(&mut self, code: u8, register: u8, other: u8, value: i32, to: L) {
        self.jumps.push((self.code.len(), to));
        self.emit(code, register, other, 0, value);
    }

    /// The program; `None`: a jump goes nowhere, or too far.
    pub(super) fn resolved(self) -> Option<Vec<Insn>> {
        let Self { mut code, jumps, labels } = self;
        for (at, to) in jumps {
            let place = labels.iter().find(|l| l.0 == to)?.1;
            code.get_mut(at)?.offset = i16::try_from(place.checked_sub(at + 1)?).ok()?;
        }
        Some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_count_from_the_next_instruction() {
        let mut asm = Asm::new();
        asm.go_if(When::Equal, R3, 7, 'x');
        asm.set(R0, 1);
        asm.go('y');
        asm.label('x');
        asm.set(R0, 2);
        asm.label('y');
        asm.exit();
        let offsets: Vec<i16> = asm.resolved().unwrap().iter().map(|i| i.offset).collect();
        assert_eq!(offsets, [2, 0, 1, 0, 0]);
    }

    #[test]
    fn a_jump_without_a_place_is_no_program() {
        let mut asm = Asm::new();
        asm.go('x');
        assert_eq!(asm.resolved(), None);
        let mut far = Asm::new();
        far.go('x');
        for _ in 0..40_000 {
            far.exit();
        }
        far.label('x');
        assert_eq!(far.resolved(), None);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn registers_stand_as_the_kernel_reads_them() {
        // r1 = *(u32 *)(r6 + 16)
        let insn = Insn::new(Width::Word as u8, R1, R6, 16, 0);
        assert_eq!((insn.code, insn.registers, insn.offset), (0x61, 0x61, 16));
    }
}
