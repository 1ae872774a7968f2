//! A Rust file as the house rules see it: code, comments and tests told apart.
//!
//! Owns just enough of a lexer for that: strings, characters and comments are blanked out of the code (and all but
//! comments out of the comments), byte for byte, so that an offset or a line means the same in all three texts.
//! Never parses Rust.

use std::ops::Range;

/// One file.
pub(super) struct Source {
    /// From the root of the workspace, with `/`.
    pub(super) path: String,
    /// As it stands.
    pub(super) text: String,
    /// Comments and literals are blanks.
    pub(super) code: String,
    /// All but comments are blanks.
    pub(super) comments: String,
    /// Byte ranges of `#[cfg(test)]` and `#[test]` items.
    tests: Vec<Range<usize>>,
    /// The whole file is a test.
    pub(super) is_test: bool,
}

impl Source {
    pub(super) fn new(path: &str, text: &str) -> Self {
        let (code, comments) = mask(text);
        let tests = test_items(&code);
        let is_test = path.split('/').rev().skip(1).any(|folder| folder == "tests" || folder == "benches");
        Self { path: path.to_owned(), text: text.to_owned(), code, comments, tests, is_test }
    }

    /// The line, from 1, of a byte.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
    }

    /// Whether the byte belongs to a test.
    pub(super) fn in_test(&self, offset: usize) -> bool {
        self.is_test || self.tests.iter().any(|t| t.contains(&offset))
    }

    /// Where `needle` stands in the code as whole words.
    pub(super) fn find(&self, needle: &str) -> Vec<usize> {
        words(&self.code, needle)
    }

    /// Names of the modules that exist for tests only (`#[cfg(test)] mod name;`).
    pub(super) fn test_modules(&self) -> Vec<&str> {
        let items = self.tests.iter().filter_map(|t| self.code.get(t.clone()));
        items.filter_map(|item| item.strip_suffix(';')?.rsplit_once("mod ").map(|(_, name)| name.trim())).collect()
    }

    /// The file's modules below `src`: `stack/src/qp/mod.rs` is `[qp]`, `stack/src/qp/ud.rs` is `[qp, ud]`.
    pub(super) fn module_path(&self) -> Vec<&str> {
        let below = self.path.split_once("/src/").map_or("", |(_, below)| below);
        let stem = below.strip_suffix(".rs").unwrap_or(below);
        stem.split('/').filter(|part| !matches!(*part, "lib" | "main" | "mod")).collect()
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Offsets of `needle` in `text` that do not continue a word on either side.
pub(super) fn words(text: &str, needle: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let joins =
        |inner: Option<u8>, outer: Option<&u8>| inner.is_some_and(is_word) && outer.is_some_and(|b| is_word(*b));
    let whole = |at: usize| {
        let before = at.checked_sub(1).and_then(|i| bytes.get(i));
        !joins(needle.bytes().next(), before) && !joins(needle.bytes().last(), bytes.get(at + needle.len()))
    };
    text.match_indices(needle).map(|(at, _)| at).filter(|at| whole(*at)).collect()
}

/// The end of the item that begins at `start` of masked code: behind its block, or behind its semicolon.
pub(super) fn item_end(code: &str, start: usize) -> usize {
    let mut depth = 0_i32;
    for (at, byte) in code.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return block_end(code, at),
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

/// The byte behind the brace that closes the one at `open`.
pub(super) fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0_i32;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        depth += match byte {
            b'{' => 1,
            b'}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

fn test_items(code: &str) -> Vec<Range<usize>> {
    let marks = ["#[cfg(test)]", "#[cfg(all(test,", "#[test]"];
    let starts = marks.iter().flat_map(|mark| code.match_indices(mark).map(|(at, _)| at));
    starts.map(|at| at..item_end(code, at)).collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// The text with comments and literals blanked, and the text with all but comments blanked.
fn mask(text: &str) -> (String, String) {
    let (mut code, mut comments) = (String::new(), String::new());
    let mut rest = text;
    let mut previous = b' ';
    while !rest.is_empty() {
        let (kind, len) = token(rest, previous);
        let (now, later) = rest.split_at_checked(len).unwrap_or((rest, ""));
        previous = now.bytes().last().unwrap_or(b' ');
        code.push_str(&if kind == Kind::Code { now.to_owned() } else { blank(now) });
        comments.push_str(&if kind == Kind::Comment { now.to_owned() } else { blank(now) });
        rest = later;
    }
    (code, comments)
}

/// As many bytes, all of them blanks or line ends.
fn blank(text: &str) -> String {
    text.bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect()
}

/// Kind and length of what `rest` begins with; code comes one character at a time.
fn token(rest: &str, previous: u8) -> (Kind, usize) {
    let one = rest.chars().next().map_or(1, char::len_utf8);
    if rest.starts_with("//") {
        return (Kind::Comment, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Kind::Comment, block_comment(rest));
    }
    let literal = match rest.as_bytes().first() {
        Some(b'"') => Some(string(rest)),
        Some(b'\'') => character(rest),
        Some(b'r') if !is_word(previous) || matches!(previous, b'b' | b'c') => raw_string(rest),
        _ => None,
    };
    literal.map_or((Kind::Code, one), |len| (Kind::Literal, len))
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(tail) = rest.as_bytes().get(at..).filter(|t| !t.is_empty()) {
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth = depth.saturating_sub(1);
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn string(rest: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in rest.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// `r"…"` with any number of `#`; a raw identifier is none.
fn raw_string(rest: &str) -> Option<usize> {
    let hashes = rest.bytes().skip(1).take_while(|b| *b == b'#').count();
    let open = 1 + hashes + 1;
    if rest.as_bytes().get(open - 1) != Some(&b'"') {
        return None;
    }
    let close = format!("\"{}", "#".repeat(hashes));
    let len = rest.get(open..)?.find(&close).map(|at| open + at + close.len());
    Some(len.unwrap_or(rest.len()))
}

/// `'x'` or an escape; a lifetime is none.
fn character(rest: &str) -> Option<usize> {
    let inner = rest.get(1..)?;
    let first = inner.chars().next()?;
    if first != '\\' {
        let end = 1 + first.len_utf8();
        return (rest.as_bytes().get(end) == Some(&b'\'')).then_some(end + 1);
    }
    // The escaped character may itself be a quote.
    inner.get(2..)?.find('\'').map(|at| 3 + at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::new("stack/src/x.rs", text).code
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        assert_eq!(code("a /* b /* c */ d */ e"), "a                   e");
        assert_eq!(code("a // b\nc"), "a     \nc");
        assert_eq!(code(r#"f("{ \" {") {}"#), "f(        ) {}");
        assert_eq!(code("r#\"a \" b\"# + br\"x\\\" + r#fn"), "           + b      + r#fn");
        assert_eq!(code("m(b'{', '\\'', 'é', '\\u{7d}')"), "m(b   ,     ,     ,         )");
    }

    #[test]
    fn a_lifetime_is_code() {
        assert_eq!(code("fn f<'a>(x: &'a str) -> &'static str {"), "fn f<'a>(x: &'a str) -> &'static str {");
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(words("unsafe_code unsafe{} my_unsafe unsafe", "unsafe"), [12, 31]);
        assert_eq!(words("$crate::a crate::b", "crate::"), [1, 10]);
        assert_eq!(words("a.unwrap() b.unwrap_or(0)", ".unwrap()"), [1]);
    }

    #[test]
    fn tests_are_told_from_code() {
        let s = Source::new("stack/src/x.rs", "fn a() {}\n#[cfg(test)]\nmod tests {\n fn b() {}\n}\nfn c() {}\n");
        let tested = |name: &str| s.find(name).into_iter().map(|at| s.in_test(at)).collect::<Vec<_>>();
        assert_eq!((tested("a"), tested("b"), tested("c")), (vec![false], vec![true], vec![false]));
        let s = Source::new("stack/src/x.rs", "#[cfg(test)]\npub(super) mod testing;\nmod other;\n");
        assert_eq!(s.test_modules(), ["testing"]);
        assert!(Source::new("cm/tests/wire.rs", "").is_test);
        assert!(!Source::new("cm/src/tests.rs", "").is_test);
    }

    #[test]
    fn files_know_their_module() {
        let module = |path| Source::new(path, "").module_path().join("::");
        assert_eq!(module("stack/src/lib.rs"), "");
        assert_eq!(module("stack/src/raw.rs"), "raw");
        assert_eq!(module("stack/src/qp/mod.rs"), "qp");
        assert_eq!(module("stack/src/device/sys/udp.rs"), "device::sys::udp");
    }
}
