// Pages opened from disk may not start workers, so the search's script runs in a hidden frame instead. Served pages keep their workers.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.onmessage = this.onerror = this.onmessageerror = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const answer = (data) => this.onmessage && this.onmessage({ data });
      // A worker's messages leave it, where a window's would come back to it. Both directions copy, as between threads.
      inside.postMessage = (data) => setTimeout(answer, 0, structuredClone(data));
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = (event) => this.onerror && this.onerror(event);
      inside.document.body.append(script);
    }

    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data);
      } else {
        const inside = this.frame.contentWindow;
        const copy = structuredClone(data);
        setTimeout(() => inside && inside.dispatchEvent(new MessageEvent("message", { data: copy })), 0);
      }
    }

    addEventListener(name, listener) {
      this["on" + name] = listener;
    }

    terminate() {
      this.frame.remove();
    }
  };
}
