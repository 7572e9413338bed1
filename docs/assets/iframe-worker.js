// Search in pages that are opened from disk, where browsers refuse worker threads: a hidden frame runs the worker's script.
"use strict";
(() => {
  if (location.protocol !== "file:") return;
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.pending = [];
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.frame.contentDocument.open();
      this.frame.contentDocument.write("<html><body></body></html>");
      this.frame.contentDocument.close();
      // The worker's postMessage goes to the page, and its importScripts loads scripts one after the other.
      inside.postMessage = data => this.deliver(data);
      inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve());
      this.load(url).then(() => {
        this.pending.forEach(data => this.send(data));
        this.pending = null;
      });
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        this.frame.contentDocument.body.appendChild(script);
      });
    }
    deliver(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    send(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.pending) this.pending.push(data);
      else this.send(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
})();
