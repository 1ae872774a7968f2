//! Why hardware cannot be had, and what the library's error numbers mean to a caller.

use std::io;

use crate::verbs::{PostError, VerbsError};

/// A device could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The library cannot be loaded.
    #[error("{library} is not installed; apt-get install {packages}")]
    NotInstalled {
        /// Its file.
        library: String,
        /// Debian's packages that have it.
        packages: &'static str,
    },
    /// The library lacks a function.
    #[error("{library} has no function {symbol}; rdma-core 33 or later is needed")]
    TooOld {
        /// Its file.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// No device has that name.
    #[error("there is no RDMA device {name}; {}", present_devices(present))]
    NoDevice {
        /// Asked for.
        name: String,
        /// Those there are.
        present: Vec<String>,
    },
    /// The device has fewer ports.
    #[error("{name} has {ports} ports, and no port {port}")]
    NoPort {
        /// The device.
        name: String,
        /// Asked for.
        port: u8,
        /// There are so many.
        ports: u8,
    },
    /// The port speaks InfiniBand.
    #[error("port {port} of {name} is not Ethernet; RoCEv2 needs that")]
    NotEthernet {
        /// The device.
        name: String,
        /// The port.
        port: u8,
    },
    /// The system refused.
    #[error("{call} on {name}: {}", io::Error::from_raw_os_error(*errno))]
    System {
        /// Function of the library.
        call: &'static str,
        /// The device, or what else was to be opened.
        name: String,
        /// Its answer.
        errno: i32,
    },
}

fn present_devices(present: &[String]) -> String {
    if present.is_empty() {
        "this machine has none (`rdma link` lists them)".into()
    } else {
        format!("there are: {}", present.join(", "))
    }
}

/// An error number of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Errno(pub(super) i32);

impl Errno {
    /// As the answer of a verb; `call` is the function that gave it.
    pub(super) const fn of(self, call: &'static str) -> VerbsError {
        match self.0 {
            libc::EBUSY => VerbsError::Busy,
            libc::ENODEV => VerbsError::DeviceGone,
            libc::EOPNOTSUPP | libc::ENOSYS => VerbsError::Unsupported(call),
            errno => VerbsError::System { call, errno },
        }
    }

    /// As the answer of a post: providers say `ENOMEM` of a full queue.
    pub(super) const fn of_post(self) -> PostError {
        match self.0 {
            libc::ENOMEM => PostError::QueueFull,
            errno => PostError::System { errno },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_cure() {
        let error =
            OpenError::NotInstalled { library: "libibverbs.so.1".into(), packages: "libibverbs1 ibverbs-providers" };
        let text = "libibverbs.so.1 is not installed; apt-get install libibverbs1 ibverbs-providers";
        assert_eq!(error.to_string(), text);
        let none = |present: &[&str]| OpenError::NoDevice {
            name: "rxe9".into(),
            present: present.iter().map(|s| (*s).to_owned()).collect(),
        };
        let text = "there is no RDMA device rxe9; this machine has none (`rdma link` lists them)";
        assert_eq!(none(&[]).to_string(), text);
        assert_eq!(none(&["rxe0", "mlx5_0"]).to_string(), "there is no RDMA device rxe9; there are: rxe0, mlx5_0");
    }

    #[test]
    fn an_error_number_keeps_its_call() {
        assert_eq!(Errno(libc::EBUSY).of("ibv_destroy_cq"), VerbsError::Busy);
        assert_eq!(Errno(libc::ENODEV).of("ibv_alloc_pd"), VerbsError::DeviceGone);
        assert_eq!(Errno(libc::EOPNOTSUPP).of("ibv_create_srq"), VerbsError::Unsupported("ibv_create_srq"));
        assert_eq!(Errno(libc::ENOSYS).of("ibv_create_srq"), VerbsError::Unsupported("ibv_create_srq"));
        let refused = Errno(libc::ENOMEM).of("ibv_reg_mr");
        assert_eq!(refused, VerbsError::System { call: "ibv_reg_mr", errno: libc::ENOMEM });
        assert_eq!(refused.to_string(), "ibv_reg_mr: Cannot allocate memory (os error 12)");
        assert_eq!(Errno(libc::ENOMEM).of_post(), PostError::QueueFull);
        assert_eq!(Errno(libc::EINVAL).of_post(), PostError::System { errno: libc::EINVAL });
    }
}
