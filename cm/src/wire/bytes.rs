//! Fixed offsets of the 232-byte message body. The bounds are checked when the program is compiled.

/// Bytes of a message behind the MAD header.
pub(super) const BODY_LEN: usize = 232;

/// The message behind the MAD header.
pub(super) type Body = [u8; BODY_LEN];

/// The `N` bytes at `AT`.
pub(super) fn get<const AT: usize, const N: usize>(body: &Body) -> [u8; N] {
    const { assert!(AT + N <= BODY_LEN) };
    let mut out = [0; N];
    out.copy_from_slice(&body[AT..AT + N]);
    out
}

/// Sets the `N` bytes at `AT`.
pub(super) fn put<const AT: usize, const N: usize>(body: &mut Body, value: [u8; N]) {
    const { assert!(AT + N <= BODY_LEN) };
    body[AT..AT + N].copy_from_slice(&value);
}

pub(super) fn u8_at<const AT: usize>(body: &Body) -> u8 {
    let [byte] = get::<AT, 1>(body);
    byte
}

pub(super) fn u16_at<const AT: usize>(body: &Body) -> u16 {
    u16::from_be_bytes(get::<AT, 2>(body))
}

/// Three bytes, most significant first.
pub(super) fn u24_at<const AT: usize>(body: &Body) -> u32 {
    let [a, b, c] = get::<AT, 3>(body);
    u32::from_be_bytes([0, a, b, c])
}

pub(super) fn u32_at<const AT: usize>(body: &Body) -> u32 {
    u32::from_be_bytes(get::<AT, 4>(body))
}

pub(super) fn u64_at<const AT: usize>(body: &Body) -> u64 {
    u64::from_be_bytes(get::<AT, 8>(body))
}

pub(super) fn put_u8<const AT: usize>(body: &mut Body, v: u8) {
    put::<AT, 1>(body, [v]);
}

pub(super) fn put_u16<const AT: usize>(body: &mut Body, v: u16) {
    put::<AT, 2>(body, v.to_be_bytes());
}

/// The low 24 bits of `v`.
pub(super) fn put_u24<const AT: usize>(body: &mut Body, v: u32) {
    let [_, a, b, c] = v.to_be_bytes();
    put::<AT, 3>(body, [a, b, c]);
}

pub(super) fn put_u32<const AT: usize>(body: &mut Body, v: u32) {
    put::<AT, 4>(body, v.to_be_bytes());
}

pub(super) fn put_u64<const AT: usize>(body: &mut Body, v: u64) {
    put::<AT, 8>(body, v.to_be_bytes());
}
