//! Access to the transport of a message.

use std::ops::{Deref, DerefMut};

use smddp_base::MessageTransport;

use super::RemoteChannels;

/// Transport of a message. Between nodes, the frames that its methods queue are sent when it is dropped.
pub struct Carrier<'a>(Transport<'a>);

enum Transport<'a> {
    Local(&'a mut (dyn MessageTransport + 'static)),
    Remote(&'a mut RemoteChannels),
}

impl<'a> Carrier<'a> {
    pub(crate) fn local(messages: &'a mut (dyn MessageTransport + 'static)) -> Self {
        Self(Transport::Local(messages))
    }

    pub(crate) fn remote(channels: &'a mut RemoteChannels) -> Self {
        Self(Transport::Remote(channels))
    }
}

impl Deref for Carrier<'_> {
    type Target = dyn MessageTransport;

    fn deref(&self) -> &Self::Target {
        match &self.0 {
            Transport::Local(messages) => *messages,
            Transport::Remote(channels) => &channels.state.messages,
        }
    }
}

impl DerefMut for Carrier<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match &mut self.0 {
            Transport::Local(messages) => *messages,
            Transport::Remote(channels) => &mut channels.state.messages,
        }
    }
}

impl Drop for Carrier<'_> {
    fn drop(&mut self) {
        if let Transport::Remote(channels) = &mut self.0 {
            channels.unflushed |= channels.send_queued();
        }
    }
}
