//! Who of a group shares this rank's node, and so which of a call's channels go through shared memory, which over the wire,
//! which both ways.

use std::sync::Arc;

use crate::net::layout::RemoteLayout;
use crate::{Channels, RecvChannel, SendChannel};

/// Where each rank of a group is, as one of them reaches it.
#[derive(Debug)]
pub struct Routes {
    pub(super) me: usize,
    /// Index in this node, for ranks that share it.
    local: Vec<Option<usize>>,
    /// Ranks of this node, ascending.
    ranks: Vec<usize>,
    /// Something on the way to other nodes keeps a copy of what is sent.
    copies: bool,
}

impl Routes {
    /// All ranks are on one node.
    pub fn local(me: usize, size: usize) -> Self {
        Self::new(me, size, (0..size).collect(), false)
    }

    pub(super) fn new(me: usize, size: usize, ranks: Vec<usize>, copies: bool) -> Self {
        let mut local = vec![None; size];
        for (index, &rank) in ranks.iter().enumerate() {
            local[rank] = Some(index);
        }
        Self { me, local, ranks, copies }
    }

    /// Its place in this node; `None` for a rank that is not here.
    pub(crate) fn local_index(&self, rank: usize) -> Option<usize> {
        self.local.get(rank).copied().flatten()
    }

    pub(super) fn places(&self) -> Vec<Option<usize>> {
        self.local.clone()
    }

    pub(super) fn rank(&self, local: usize) -> usize {
        self.ranks.get(local).copied().unwrap_or(local)
    }

    pub(super) fn size(&self) -> usize {
        self.local.len()
    }

    /// Ranks of other nodes.
    pub(super) fn elsewhere(&self) -> Vec<usize> {
        (0..self.size()).filter(|&rank| self.local[rank].is_none()).collect()
    }

    /// The ways of a call's channels: found once, when the call is bound.
    pub fn route(&self, channel_layout: &Arc<Channels>) -> RoutedChannels {
        if self.ranks.len() == self.size() {
            return RoutedChannels { local: channel_layout.clone(), remote: None, unannounced: false };
        }
        let mut local = Channels { depth: channel_layout.depth, ..Channels::default() };
        let (mut outs, mut ins) = (Vec::new(), Vec::new());
        let (mut remote_sends, mut remote_recvs) = (Vec::new(), Vec::new());
        for (channel, send_channel) in channel_layout.send_channels.iter().enumerate() {
            let remote: Vec<usize> =
                send_channel.readers.iter().copied().filter(|&r| self.local[r].is_none()).collect();
            let shm = remote.len() < send_channel.readers.len();
            // A reader finds its line by its number among all readers.
            let readers = send_channel.readers.iter().map(|&r| self.local[r].unwrap_or(SendChannel::REMOTE));
            local.send_channels.push(if shm {
                SendChannel { readers: readers.collect(), ..send_channel.clone() }
            } else {
                SendChannel { readers: Vec::new(), cell: 0, messages: 0, bytes: 0 }
            });
            let net = (!remote.is_empty()).then_some(remote_sends.len());
            if net.is_some() {
                remote_sends.push((channel, SendChannel { readers: remote, ..send_channel.clone() }));
            }
            outs.push(SendRoute { shm, net });
        }
        for recv_channel in &channel_layout.recv_channels {
            ins.push(match self.local[recv_channel.rank] {
                Some(rank) => {
                    local.recv_channels.push(RecvChannel { rank, ..*recv_channel });
                    RecvRoute::LocalChannels(local.recv_channels.len() - 1)
                }
                None => {
                    remote_recvs.push(*recv_channel);
                    RecvRoute::Remote(remote_recvs.len() - 1)
                }
            });
        }
        // A writer needs cells for its own work alone where the wire copies what is on its way.
        let written = if self.copies {
            channel_layout.window.min(channel_layout.depth.0)
        } else {
            channel_layout.window
        };
        let net =
            Arc::new(RemoteLayout::new(self.me, remote_sends, &remote_recvs, channel_layout.window, written));
        let remote = Some(Arc::new(ChannelRoutes { outs, ins, net, direct: self.copies }));
        RoutedChannels { local: Arc::new(local), remote, unannounced: false }
    }
}

#[derive(Clone, Copy)]
pub(super) enum RecvRoute {
    LocalChannels(usize),
    Remote(usize),
}

#[derive(Clone, Copy)]
pub(super) struct SendRoute {
    pub(super) shm: bool,
    pub(super) net: Option<usize>,
}

/// Where a call's channels go, in a group that spans nodes.
#[derive(Default)]
pub(super) struct ChannelRoutes {
    pub(super) outs: Vec<SendRoute>,
    pub(super) ins: Vec<RecvRoute>,
    pub(super) net: Arc<RemoteLayout>,
    /// The wire takes messages from any memory and brings them to any.
    direct: bool,
}

/// A call's channels with their ways; kept with the bound call.
#[derive(Clone, Default)]
pub struct RoutedChannels {
    /// Ranks by their places in this node. Channels keep their numbers; those without a reader here are empty.
    pub(super) local: Arc<Channels>,
    pub(super) remote: Option<Arc<ChannelRoutes>>,
    /// Who asks this rank how far it is is not told that it has begun this call.
    pub(super) unannounced: bool,
}

impl RoutedChannels {
    /// The same for a call that only ends what this rank does in the group: to the others it is in none of theirs.
    #[must_use]
    pub fn unannounced(self) -> Self {
        Self { unannounced: true, ..self }
    }

    /// Whether messages of that outlet may leave from the call's own memory: all its readers are beyond such a wire.
    pub fn sends_in_place(&self, channel: usize) -> bool {
        let routes = self.remote.as_ref().filter(|routes| routes.direct);
        routes.is_some_and(|routes| matches!(routes.outs[channel], SendRoute { shm: false, net: Some(_) }))
    }

    /// Whether messages of that outlet may stay where they lie: all its readers map this process's memory.
    pub fn may_be_source(&self, channel: usize) -> bool {
        let local =
            |routes: &Arc<ChannelRoutes>| matches!(routes.outs[channel], SendRoute { shm: true, net: None });
        !self.local.inline && self.remote.as_ref().is_none_or(local)
    }

    /// Whether messages of that inlet may lie in their writer's own memory: it is of this node.
    pub fn may_be_target(&self, recv_channel: usize) -> bool {
        let local =
            |routes: &Arc<ChannelRoutes>| matches!(routes.ins[recv_channel], RecvRoute::LocalChannels(_));
        !self.local.inline && self.remote.as_ref().is_none_or(local)
    }

    /// Whether messages of that inlet may arrive in the call's own memory.
    pub fn receives_in_place(&self, recv_channel: usize) -> bool {
        let routes = self.remote.as_ref().filter(|routes| routes.direct);
        routes.is_some_and(|routes| matches!(routes.ins[recv_channel], RecvRoute::Remote(_)))
    }
}

impl std::fmt::Debug for RoutedChannels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.remote.is_some() { "Wired(near and far)" } else { "Wired(near)" })
    }
}
