//! RDMA hardware behind `--device hw:NAME`.
//!
//! Owns which library is opened, and how a missing one is told. Built without the feature `hw` it only says so.

use crate::exit::Failure;

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HwArg {
    /// The device, as ibv_devices names it.
    pub(crate) name: String,
    /// Its port; 1 is the first.
    pub(crate) port: u8,
}

#[cfg(feature = "hw")]
pub(crate) use self::built::{Hardware, connection_manager, interface, names, open};
#[cfg(not(feature = "hw"))]
pub(crate) use self::not_built::{Hardware, interface, names, open};

#[cfg(feature = "hw")]
mod built {
    use uroce::engine::PollPolicy;
    use uroce::hw::{HwDevice, Library, OpenError, device_names};
    use uroce_cm::hw::{CmLibrary, HwCm};

    use super::{Failure, HwArg};
    use crate::node::Endpoint;
    use crate::wrap;

    /// An opened device.
    pub(crate) type Hardware = HwDevice;

    /// Another file in place of libibverbs.so.1.
    const LIBRARY: &str = "UROCE_LIBIBVERBS";
    /// Another file in place of librdmacm.so.1.
    const CM_LIBRARY: &str = "UROCE_LIBRDMACM";

    impl Endpoint for HwDevice {
        fn is_hardware(&self) -> bool {
            true
        }

        fn set_poll_policy(&mut self, _: PollPolicy) {}
    }

    impl From<OpenError> for Failure {
        fn from(error: OpenError) -> Self {
            Self::Environment(error.to_string())
        }
    }

    /// Opens the device.
    pub(crate) fn open(arg: &HwArg) -> Result<Hardware, Failure> {
        if wrap::is_asked_for() {
            return Err(Failure::Usage("hardware sends and receives by itself; leave --fault and --pcap out".into()));
        }
        Ok(HwDevice::open(&load()?, &arg.name, arg.port)?)
    }

    fn load() -> Result<Library, OpenError> {
        match std::env::var(LIBRARY) {
            Ok(file) => Library::load_from(&file),
            Err(_) => Library::load(),
        }
    }

    /// The kernel's connection manager.
    pub(crate) fn connection_manager() -> Result<HwCm, Failure> {
        let library = match std::env::var(CM_LIBRARY) {
            Ok(file) => CmLibrary::load_from(&file)?,
            Err(_) => CmLibrary::load()?,
        };
        Ok(HwCm::new(&library)?)
    }

    /// The devices of this machine.
    pub(crate) fn names() -> Vec<String> {
        load().map_or_else(|_| Vec::new(), |library| device_names(&library))
    }

    /// The network interface of its port.
    pub(crate) fn interface(device: &Hardware) -> Option<String> {
        device.interface()
    }
}

#[cfg(not(feature = "hw"))]
mod not_built {
    use super::{Failure, HwArg};

    /// There is none.
    pub(crate) type Hardware = uroce::host::Handle;

    /// None that could be opened.
    pub(crate) fn names() -> Vec<String> {
        Vec::new()
    }

    /// None.
    pub(crate) fn interface(_: &Hardware) -> Option<String> {
        None
    }

    /// Says so.
    pub(crate) fn open(_: &HwArg) -> Result<Hardware, Failure> {
        Err(Failure::Environment("this uroce was built without the feature hw; build it with `--features hw`".into()))
    }
}
