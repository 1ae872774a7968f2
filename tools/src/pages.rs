//! `--hugepages`: asks for huge pages, and says which pages came.
//!
//! Owns the flag's meaning and the one remark about it. The memory itself is the stack's.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use uroce::raw::{PageUse, page_use, prefer_huge_pages};

use crate::report::remark;

static WANTED: AtomicBool = AtomicBool::new(false);
static REMARKED: AtomicBool = AtomicBool::new(false);

/// What came, for JSON documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    huge_bytes: u64,
    normal_bytes: u64,
}

/// The flag was given: from now on large blocks ask for huge pages.
pub(crate) fn install() {
    WANTED.store(true, Ordering::Relaxed);
    prefer_huge_pages();
}

/// What came so far; `None`: the flag was not given.
pub(crate) fn report() -> Option<Report> {
    let PageUse { huge, refused } = page_use();
    WANTED.load(Ordering::Relaxed).then_some(Report { huge_bytes: huge, normal_bytes: refused })
}

/// As a line of `uroce devinfo`.
pub(crate) fn text() -> Option<String> {
    report().map(|r| format!("{} bytes, {} on normal pages", r.huge_bytes, r.normal_bytes))
}

/// Says, once in a process, that normal pages came where huge ones were wanted.
pub(crate) fn remark_if_refused() {
    if report().is_some_and(|r| r.normal_bytes > 0) && !REMARKED.swap(true, Ordering::Relaxed) {
        remark(refusal(cfg!(feature = "hugepages")));
    }
}

const fn refusal(built: bool) -> &'static str {
    if built {
        "--hugepages: normal pages are used, as the system has not enough huge ones; `sysctl vm.nr_hugepages=64` reserves some"
    } else {
        "--hugepages: normal pages are used, as this program was built without the feature hugepages"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_flag_nothing_is_said() {
        assert_eq!(report(), None);
        assert_eq!(text(), None);
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        assert!(refusal(true).contains("vm.nr_hugepages"));
        assert!(refusal(false).contains("feature hugepages"));
    }
}
